"""The params model as text: a params file with every setting explained, and the table in the README."""

import json
from collections.abc import Iterator

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from eagle3_helpers.params import Params, Section


def commented_params(given: dict) -> str:
    """A params file with every setting, its default and its meaning; `given` holds dotted names and values."""
    lines = []
    for name, field in Params.model_fields.items():
        if _section(field) is None:
            lines += [f"{name}: {_value(given[name])}  # {field.description}", ""]
            continue
        lines.append(f"{name}:  # {_section(field).__doc__}")
        for inner, setting in _section(field).model_fields.items():
            value = given.get(f"{name}.{inner}", setting.default)
            lines.append(f"  # {setting.description}")
            lines.append(f"  {'# ' if value is None else ''}{inner}: {'' if value is None else _value(value)}".rstrip())
        lines.append("")
    return "\n".join(lines)


def reference_table() -> str:
    """Markdown: every setting, its default, its meaning."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in settings():
        default = (
            "required" if field.default is PydanticUndefined else "" if field.default is None else _value(field.default)
        )
        rows.append(
            f"| `{name}` | {f'`{default}`' if default and default != 'required' else default} | {field.description} |"
        )
    return "\n".join(rows)


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every setting, in the order of the model."""
    for name, field in Params.model_fields.items():
        section = _section(field)
        if section is None:
            yield name, field
        else:
            yield from ((f"{name}.{inner}", setting) for inner, setting in section.model_fields.items())


def _section(field: FieldInfo) -> type[Section] | None:
    return field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, Section) else None


def _value(value) -> str:
    """As YAML that reads back as the same value and type (a float keeps its dot)."""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else repr(value)
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    print(reference_table())
