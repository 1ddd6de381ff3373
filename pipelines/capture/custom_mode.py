"""The user's class that decides about snapshots where `snapshot.mode` is custom."""

from __future__ import annotations

import importlib

from cdc_core import errors
from cdc_core.properties.source import Source
from cdc_core.snapshot import mode as snapshot_mode


def snapshotter(source: Source) -> snapshot_mode.Snapshotter | None:
    """An instance of the class in `snapshot.mode.custom.name` (`package.module:Class`); None where the option is not set.

    Raises `SettingsError` where the class cannot be imported, or created without arguments, or lacks a method.
    """
    name = source.snapshot_mode_custom_name
    if name is None:
        return None
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        instance: snapshot_mode.Snapshotter = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise errors.SettingsError(
            errors.Problem(
                "source.snapshot.mode.custom.name",
                f"{name} cannot be imported, or created without arguments: {type(error).__name__}: {error}",
            )
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(instance, method, None))]
    if missing:
        message = f"{name} has no method {', '.join(missing)}"
        raise errors.SettingsError(errors.Problem("source.snapshot.mode.custom.name", message))
    return instance


_METHODS = tuple(name for name in vars(snapshot_mode.Snapshotter) if name.startswith("should_"))
