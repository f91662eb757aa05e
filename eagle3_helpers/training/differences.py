"""What differs between two plans, or two specs, field by field and as one sentence."""

import json

NAMED = 4  # in one sentence; longer lists are cut
SHOWN = 60  # characters of a value


def dotted(values: dict, place: str = "") -> dict:
    """Nested dicts as one, {"training.lr": 0.001}. Lists are values."""
    flat = {}
    for name, value in values.items():
        inner = isinstance(value, dict) and value
        flat.update(dotted(value, f"{place}{name}.") if inner else {f"{place}{name}": value})
    return flat


def differences(old: dict, new: dict) -> list[tuple]:
    """(dotted field, value in `old`, value in `new`) of each that differs, by name; None where one has no such field."""
    a, b = dotted(old), dotted(new)
    return [(name, a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def told(changes: list[tuple]) -> str:
    """ "training.lr 0.003 -> 0.001, training.seed 0 -> 1, 2 more" """
    texts = [f"{name} {_short(before)} -> {_short(after)}" for name, before, after in changes[:NAMED]]
    more = [f"{len(changes) - NAMED} more"] if len(changes) > NAMED else []
    return ", ".join([*texts, *more])


def _short(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
