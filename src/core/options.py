"""Base class and validators of option classes.

Each package declares the options of its components as chz classes in its module `options`. A component takes
an object of its own option class. The configuration of a program inherits the classes of all its components
and is passed to each component unchanged. The `options` modules must not import slow modules, which would
delay `--help` and the messages for mistyped options.

The first line of a class's docstring is the heading of its section in `--help` and in docs/options.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import chz

Validator = Callable[[Any, str], None]


class Options:
    """Base of all option classes.

    A class that inherits several others keeps the validators of all of them.
    """

    def __init_subclass__(cls) -> None:
        """Collect the validators of all bases.

        chz reads them from one class attribute. Without this method, a class that declares no validators
        would inherit the attribute of its first base only.
        """
        super().__init_subclass__()
        validators: list[Callable[[Any], None]] = []
        for base in reversed(cls.__mro__):
            inherited = vars(base).get("__chz_validators__", ())
            validators += [validator for validator in inherited if validator not in validators]
        cls.__chz_validators__ = validators


def field_validator(is_valid: Callable[[float], bool], phrase: str) -> Validator:
    """Return a field validator that accepts None and valid numbers. `phrase` says which numbers are valid."""

    def validate(options: Any, name: str) -> None:
        value = _value(options, name)
        require(value is None or is_valid(value), f"{_name(name)} {phrase}, not {value}")

    return validate


def at_least(minimum: float) -> Validator:
    """Return a field validator that accepts None and numbers of at least `minimum`."""
    phrase = "must not be negative" if minimum == 0 else f"must be at least {minimum:g}"
    return field_validator(lambda value: value >= minimum, phrase)


def above(minimum: float) -> Validator:
    """Return a field validator that accepts None and numbers greater than `minimum`."""
    return field_validator(lambda value: value > minimum, f"must be above {minimum:g}")


finite = field_validator(math.isfinite, "must be finite")
share_or_0 = field_validator(lambda value: 0 <= value <= 1, "must lie between 0 and 1")
share = field_validator(lambda value: 0 < value <= 1, "must be above 0 and at most 1")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def pairs(items: list[str] | None, *, option: str) -> dict[str, str]:
    """Split `key=value` items. Raises ValueError for any other item; the message contains the name `option`.

    >>> pairs(["cpus=2", "image=a"], option="environment_kwargs")
    {'cpus': '2', 'image': 'a'}
    """
    split = [item.partition("=") for item in items or []]
    for (key, equals, _), item in zip(split, items or [], strict=True):
        require(
            bool(key and equals),
            f"{option} takes key=value pairs, not {item!r}; write {option}=key=value,other=value",
        )
    return {key: value for key, _, value in split}


def is_http_address(text: str) -> bool:
    """Return whether the text is an HTTP address with a host and, if it names a port, with a valid port.

    >>> [is_http_address(text) for text in ("http://[::1]:8000/v1", "http://h:99999", "http://[::1", "h:80")]
    [True, False, False, False]
    """
    try:
        address = urlsplit(text)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return False


def is_default(options: Options, name: str) -> bool:
    return _value(options, name) == inspect.signature(type(options)).parameters[name].default


@chz.chz
class SeedOptions(Options):
    """Batches and schedule"""

    seed: int = chz.field(
        default=0,
        doc="Seed of every sample and of environments; in training also of the adapter, the task order and "
        "the choice of held-out tasks",
        validator=at_least(0),
    )


def sections(kind: type[object]) -> dict[str, list[str]]:
    """Return a mapping: heading of a section -> names of its options in `kind`, in the order of declaration.

    Classes with the same heading share a section. An option that a derived class declares again belongs to
    the section of the derived class.
    """
    by_heading: dict[str, list[str]] = {}
    declared: set[str] = set()
    for owner in kind.__mro__:
        names = [name for name in inspect.get_annotations(owner) if name in chz.chz_fields(kind)]
        heading = (owner.__doc__ or "").partition("\n")[0].rstrip(".")
        if new := [name for name in names if name not in declared]:
            by_heading[heading] = [*new, *by_heading.get(heading, [])]
            declared.update(new)
    return by_heading


def _value(options: Any, name: str) -> Any:
    return vars(options)[f"X_{_name(name)}"]


def _name(name: str) -> str:
    """Return the name of an option. chz may pass `X_name`, the field with the option's raw value."""
    return name.removeprefix("X_")
