"""The examples in the docstrings run, and every public name has one and says where it belongs."""

import doctest
import importlib
import inspect
import pkgutil
import types

import pytest
import torch

import measureattn

PUBLIC = {name: getattr(measureattn, name) for name in measureattn.__all__}


def module_names():
    found = pkgutil.walk_packages(measureattn.__path__, "measureattn.")
    return ["measureattn", *(m.name for m in found if not m.name.endswith("__main__"))]


def public_objects():
    """The names of `measureattn.__all__`; of a module among them, what it defines itself."""
    found = {}
    for name, value in PUBLIC.items():
        if not isinstance(value, types.ModuleType):
            found[name] = value
            continue
        for inner, thing in vars(value).items():
            own = getattr(thing, "__module__", None) == value.__name__
            if own and callable(thing) and not inner.startswith("_"):
                found[f"{name}.{inner}"] = thing
    return found


def examples_of(name):
    """The doctests of a module, with the public names at hand as after `import *`."""
    module = importlib.import_module(name)
    names = {"torch": torch, **PUBLIC, **vars(module)}
    return [t for t in doctest.DocTestFinder().find(module, extraglobs=names) if t.examples]


@pytest.mark.parametrize("name", module_names())
def test_examples_print_what_they_say(name):
    torch.set_printoptions(profile="default")
    for test in examples_of(name):
        report = []
        result = doctest.DocTestRunner().run(test, out=report.append)
        assert result.failed == 0, "".join(report)


def test_the_examples_are_found():
    """Decorators must not hide them from the finder: each public name's own is among them."""
    found = {test.name for name in module_names() for test in examples_of(name)}
    for name, thing in public_objects().items():
        assert f"{thing.__module__}.{thing.__qualname__}" in found, f"no example is run for {name}"


@pytest.mark.parametrize(("name", "thing"), public_objects().items(), ids=public_objects())
def test_public_names_have_an_example_a_source_and_a_chapter(name, thing):
    text = inspect.getdoc(thing) or ""
    for part in (">>> ", "Source: ", "See: "):
        assert part in text, f"the docstring of {name} lacks {part!r}"
