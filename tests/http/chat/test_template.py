"""Rendering chat templates: like transformers, in a sandbox, within a time limit."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from actorserve.errors import InvalidRequestError, ModelError
from actorserve.http.chat import template as template_module
from actorserve.http.chat.template import ChatTemplate
from actorserve.http.errors import RequestFailedError
from actorserve.model_files.describe import describe

_HELLO: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]


@contextmanager
def _template(source: str, timeout_s: float = 30.0) -> Iterator[ChatTemplate]:
    template = ChatTemplate(
        source, {"bos_token": "<s>"}, timeout_s=timeout_s, now=lambda: datetime(2024, 7, 26, 12, 0, 0)
    )
    try:
        yield template
    finally:
        template.close()


@pytest.mark.model
async def test_the_default_models_template_renders(default_model_path: Path) -> None:
    """The default model's own template gives ChatML, with its default system message."""
    description = describe(default_model_path)
    with _template(description.chat_template or "") as template:
        text = await template.render(_HELLO)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


_SOURCES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m['content'] | trim }}]\n  {% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}",
    "{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", _SOURCES)
async def test_templates_render_as_transformers_does(source: str) -> None:
    """White space, loop controls, namespaces, tojson and generation tags are rendered as by transformers."""
    chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages: list[dict[str, object]] = [
        {"role": "user", "content": " Hé <b>&'\"\n"},
        {"role": "assistant", "content": "日本"},
    ]
    expected, _ = chat_utils.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    with _template(source) as template:
        assert await template.render(messages) == expected[0]


async def test_text_parts_are_joined() -> None:
    """Content given as text parts is text, joined by line breaks; no content is empty text."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with _template("{% for m in messages %}[{{ m.content }}]{% endfor %}") as template:
        text = await template.render([{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert text == "[one\ntwo][]"


@pytest.mark.parametrize("content", [7, {"type": "text"}, [7], [{"type": "image_url", "image_url": {"url": "x"}}]])
async def test_other_content_is_refused_by_name(content: object) -> None:
    """Content that is neither text nor text parts is an error that names the message."""
    with _template("{{ messages }}") as template, pytest.raises(InvalidRequestError) as caught:
        await template.render([*_HELLO, {"role": "user", "content": content}])
    assert caught.value.param == "messages[1].content"


async def test_arguments_cannot_replace_messages() -> None:
    """A client's template arguments reach the template, but cannot replace messages or special tokens."""
    with _template("{{ bos_token }}{{ messages[0].content }}{{ tone }}") as template:
        text = await template.render(_HELLO, arguments={"tone": "!", "bos_token": "evil", "messages": []})
    assert text == "<s>Hello!"


async def test_the_date_is_given() -> None:
    """strftime_now formats the time of the given clock."""
    with _template("{{ strftime_now('%d %b %Y') }}") as template:
        assert await template.render(_HELLO) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "refused: roles must alternate"),
        ("{{ messages[0].content + 7 }}", "refused"),
        ("{{ messages[9].content.text }}", "refused"),
        ("{{ 1 / 0 }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ (namespace(__class__=1)) }}", "refused"),
        ("{{ range(10 ** 9) }}", "refused"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refused"),
    ],
)
async def test_a_templates_failure_is_an_error_of_the_request(source: str, problem: str) -> None:
    """Any exception of a template, even at an attempt to escape the sandbox, is one line for the client."""
    with _template(source) as template, pytest.raises(InvalidRequestError, match=problem) as caught:
        await template.render(_HELLO)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_an_endless_template_is_ended_and_its_thread_freed() -> None:
    """If there are more endless renderings than threads, all of them end, and the next one is served."""
    source = "{% if messages[0].content == 'loop' %}" + _ENDLESS + "{% endif %}done"
    with _template(source, timeout_s=0.05) as template:
        for _ in range(4):
            with pytest.raises(InvalidRequestError, match="too long"):
                await template.render([{"role": "user", "content": "loop"}])
        assert await template.render(_HELLO) == "done"


async def test_a_wait_for_a_thread_is_not_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other renderings hold all threads, a chat gets a 503 that invites it to come again, and no 400."""
    monkeypatch.setattr(template_module, "_PATIENCE_S", 0.0)
    source = "{% if messages[0].content == 'loop' %}" + _ENDLESS + "{% endif %}done"
    with _template(source, timeout_s=0.5) as template:
        renderings = [template.render([{"role": "user", "content": "loop"}]) for _ in range(2)]
        *_, failure = await asyncio.gather(*renderings, template.render(_HELLO), return_exceptions=True)
    assert isinstance(failure, RequestFailedError)
    assert (failure.status, failure.retry_after_s) == (503, 1.0)


async def test_an_endless_output_is_ended() -> None:
    """A template that multiplies a long message is cut off by its size."""
    source = "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with _template(source) as template, pytest.raises(InvalidRequestError, match="too long a prompt"):
        await template.render([{"role": "user", "content": "x" * 2**20}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ unclosed", "{% unknown_tag %}"])
def test_an_invalid_template_is_the_models_error(source: str) -> None:
    """A template that does not compile is found when the model is loaded."""
    with pytest.raises(ModelError, match="chat template is not valid"):
        ChatTemplate(source, {}, timeout_s=1.0)
