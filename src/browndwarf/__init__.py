"""browndwarf finds, proves and runs the fastest MTP speculative decoding a machine can hold.

It drives an unmodified llama.cpp. The floors, from the top: ``cli``, ``report``, the jobs
(``plan``, ``sweep``, ``bench``, ``quality``, ``decode``), the world outside Python
(``engine``, ``models``, ``hardware``), and the pure modules here. Imports go downward only.

Example:
    import browndwarf

    with browndwarf.load("demo", draft="demo") as llm:
        print(llm.answer([{"role": "user", "content": "Tell me a story."}]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from browndwarf.decode.llm import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The runtime is imported with its first use, so that the package itself stays light.
    if name == "load":
        from browndwarf.decode.llm import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
