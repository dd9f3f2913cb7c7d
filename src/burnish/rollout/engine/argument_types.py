"""Refuses values of other types than they are declared with.

Records do not check what they are built from, and one odd value would stop the step of a whole
batch: a float among the tokens, one number where several belong.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, Grammar, SamplingParams

E = TypeVar("E", bound=StrEnum)

_REQUEST: Mapping[str, tuple[type, ...]] = {
    "request_id": (str,),
    "priority": (Integral,),
    "session_id": (str, type(None)),
    "adapter": (str, type(None)),
    "prompt_logprobs": (bool,),
    "params": (SamplingParams,),
}
_PARAMS: Mapping[str, tuple[type, ...]] = {
    "temperature": (Real,),
    "top_p": (Real,),
    "max_tokens": (Integral,),
    "seed": (Integral,),
    "top_k": (Integral,),
    "min_p": (Real,),
    "min_tokens": (Integral,),
    "num_top_logprobs": (Integral,),
    "grammar": (Grammar, type(None)),
}
_NAMES = {Integral: "an integer", Real: "a number", str: "a text", bool: "a truth value"}


def check_types(request: GenerateRequest) -> None:
    """Refuse a request with a value of another type.

    Raises:
        UserError: naming the value.
    """
    where, params = f"request {request.request_id}:", request.params
    for owner, fields in ((request, _REQUEST), (params, _PARAMS)):
        for name, types in fields.items():
            check_one(f"{where} {name}", getattr(owner, name), types)
    check_each(f"{where} prompt_ids", request.prompt_ids, Integral)
    check_each(f"{where} stop_token_ids", params.stop_token_ids, Integral)
    check_each(f"{where} stop", params.stop, str)


def check_one(what: str, value: object, types: tuple[type, ...]) -> None:
    """Refuse what is of none of these types.

    Raises:
        UserError: naming the value.
    """
    if not isinstance(value, types):
        raise _refused(what, value, _NAMES.get(types[0], f"a {types[0].__name__}"))


def check_each(what: str, values: Sequence[Any], wanted: type) -> None:
    """Refuse what is no tuple or list, or has members of another type.

    Raises:
        UserError: naming the first of them.
    """
    if not isinstance(values, tuple | list):
        raise _refused(what, values, "a tuple")
    # By kind: a prompt has many tokens, of one or two types.
    strange = {kind for kind in set(map(type, values)) if not issubclass(kind, wanted)}
    if strange:
        found = next(value for value in values if type(value) in strange)
        raise _refused(f"a member of {what}", found, _NAMES[wanted])


def check_version(version: object) -> None:
    """Refuse what cannot be compared with other versions.

    Raises:
        UserError: naming it.
    """
    check_one("a version of weights", version, (Integral,))


def member(kind: type[E], value: object) -> E:
    """The member of a vocabulary, also for its plain text.

    Raises:
        UserError: naming those that there are.
    """
    for each in kind:
        if each == value:
            return each
    raise UserError(f"{kind.__name__} has no {value!r:.80}.", fix=f"use {', '.join(kind)}.")


def _refused(what: str, value: object, wanted: str) -> UserError:
    return UserError(
        f"{what} is {value!r:.80}, of type {type(value).__name__}.", fix=f"give {wanted}."
    )
