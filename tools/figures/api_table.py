"""The table of actorserve/http/README.md that tells what each API takes, ignores and refuses, written from the code.

``python -m tools.figures.api_table`` writes it into the file.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from starlette.routing import Route

from actorserve.http.openapi.document import make_document
from actorserve.http.openapi.operation import Operation
from actorserve.http.openapi.operations import OPERATIONS

README: Final = Path(__file__).parents[2] / "actorserve" / "http" / "README.md"
BEGIN: Final = "<!-- fields -->\n"
END: Final = "<!-- end -->\n"


def field_table(operations: Sequence[Operation]) -> str:
    """A row per API and kind of field, in Markdown."""
    with_bodies = [operation for operation in operations if operation.requests]
    routes = [Route(each.path, lambda _: None, methods=[each.method]) for each in with_bodies]
    schemas = make_document(routes, with_bodies, "", allows_unknown_fields=True)["components"]["schemas"]
    rows = ["| API | | fields |", "|---|---|---|"]
    for operation in with_bodies:
        fields: dict[str, dict[str, Any]] = schemas[operation.requests[0].__name__]["properties"]
        ignored = [name for name, field in fields.items() if field.get("description") == "ignored"]
        limited = {name: field["enum"] for name, field in fields.items() if "enum" in field}
        taken = [name for name in fields if name not in limited and name not in ignored]
        rows.append(f"| `{operation.method} {operation.path}` | taken | {_list(taken)} |")
        rows.append(f"| | ignored | {_list(ignored)} |")
        rows.append(f"| | another value is refused | {', '.join(map(_limited, limited, limited.values())) or 'none'} |")
    return "\n".join(rows) + "\n"


def filled(text: str) -> str:
    """The README with the table of today's code."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{field_table(OPERATIONS)}\n{END}{after}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def _limited(name: str, values: Sequence[object]) -> str:
    return " or ".join(f"`{name}: {json.dumps(value)}`" for value in values if value is not None) or f"`{name}: null`"


def main() -> int:
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
