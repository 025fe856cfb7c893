"""The user's own functions, which an option names as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from src.core.errors import ConfigError


def load_function(name: str, *, option: str, value: str | None = None) -> Callable[..., Any]:
    """Import the function `module:function` that `option` names.

    Error messages show `value` as the value of the option; None: they show `name`. Raises ConfigError if the
    module cannot be imported or has no such function.
    """
    setting, (module_name, _, function_name) = f"{option}={value or name}", name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: cannot import {module_name} ({error}); install it, or add its "
            "directory to PYTHONPATH"
        ) from error
    except Exception as error:  # The user's module can raise anything while it is imported.
        raise ConfigError(
            f"{setting}: cannot import {module_name} ({type(error).__name__}: {error}); fix the module"
        ) from error
    function = vars(module).get(function_name)
    if function is None:
        raise ConfigError(f"{setting}: {module_name} has no function {function_name}; correct the name")
    if not callable(function):
        raise ConfigError(f"{setting}: {function_name} of {module_name} is not a function; name a function")
    return function
