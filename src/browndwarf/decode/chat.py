"""From messages to a prompt, through the chat template that the model carries.

Templates are programs of whoever made the model: they run in jinja2's sandbox, which lets them
read their arguments and nothing else. Messages have OpenAI's form; ``reasoning_content`` and
``tool_calls`` of earlier answers are handed on.

Boundary: text only; the answer's way back is ``answer``.

Example:
    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    'user: Hi;'
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from browndwarf.errors import UsageError

Message = Mapping[str, Any]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatTemplate:
    """A compiled template. ``bos`` and ``eos`` are the texts of those tokens."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Compile ``source``.

        Raises:
            UsageError: there is none, or it is no template.
        """
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not source.strip():
            raise UsageError(
                "the model has no chat template",
                why="its file does not carry one",
                fix="give a prompt as text instead of messages",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except TemplateError as exc:
            raise _bad_template(exc) from exc

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        open_answer: bool = True,
    ) -> str:
        """The prompt's text; ``open_answer`` ends it where the model is to go on.

        Raises:
            UsageError: a message has no known role, or the template refuses.
        """
        from jinja2 import TemplateError

        for message in messages:
            if message.get("role") not in _ROLES:
                raise UsageError(
                    f"a message has the role {message.get('role')!r}",
                    why=f"roles are {', '.join(sorted(_ROLES))}",
                    fix="correct the message",
                )
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=[dict(t) for t in tools] if tools else None,
                enable_thinking=thinking,
                add_generation_prompt=open_answer,
                **self._tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as exc:
            raise _bad_template(exc) from exc


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _bad_template(exc: Exception) -> UsageError:
    return UsageError(
        "the chat template does not take these messages",
        why=f"{type(exc).__name__}: {exc}",
        fix="check their order and roles",
    )
