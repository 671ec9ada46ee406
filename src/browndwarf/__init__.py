"""browndwarf finds, proves and runs the fastest MTP speculative decoding a machine can hold.

It drives an unmodified llama.cpp. The floors, from the top: ``cli``, ``report``, the jobs
(``plan``, ``sweep``, ``bench``, ``quality``, ``decode``), the world outside Python
(``engine``, ``models``, ``hardware``), and the pure modules here. Imports go downward only.
"""

__version__ = "0.1.0"
