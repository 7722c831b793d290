"""What the body of a request is: an object whose fields are declared once, and refused by name.

null means "not given" everywhere but inside lists. Nothing is converted, but that 2.0 is an
integer, as in JSON Schema.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sgl_spec.errors import preview
from sgl_spec.request import refusal

# How alike two names are (by `difflib`, at most 1) of which one may be the other misspelt. Another
# server's field is likelier than a worse slip: "image_data" and "metadata" are alike by 0.67.
NEAR = 0.8


T = TypeVar("T")
# A list that is refused at its first bad member: one error for each of a million blocks a server.
Many = Annotated[list[T], Field(fail_fast=True)]


def fault(name: str, message: str) -> PydanticCustomError:
    """What is wrong with the field `name` of the object at hand; "{field}" in the message is its
    path in the body, "{value}" its value."""
    return PydanticCustomError("refused", "{text}", {"field": name, "text": message})


def words(allowed: str) -> WrapValidator:
    """Says what a field of several types takes, where pydantic would name each type by itself; of a
    list also the place where the type that got farthest failed."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            steps = [step for one in error.errors() for step in one["loc"][:2]]
            places = [step for step in steps if isinstance(step, int)]
            where = f" (look at [{max(places)}])" if places else ""
            text = {"a": allowed + where}
            raise PydanticCustomError("words", "Input should be {a}", text) from None

    return WrapValidator(check)


class Body(BaseModel):
    """An object that a client sends.

    unsupported: fields of other servers, each with the values that ask for nothing; null does
    always. elsewhere: fields that other routes or servers have, with what to say of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def read(cls, body: object) -> Self:
        """The body, checked; raises `InvalidRequestError` naming a field that is wrong."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise refusal(error, body) from None

    @model_validator(mode="wrap")
    @classmethod
    def _names(cls, body: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse names that are not known here, and leave out what is null."""
        if not isinstance(body, dict):
            return validate(body)
        for name, value in body.items():
            cls._check_name(name, value)
        names = cls.names()
        return validate({k: whole(v) for k, v in body.items() if v is not None and k in names})

    @classmethod
    @functools.cache
    def names(cls) -> dict[str, None]:
        """What clients call its fields, in order."""
        return dict.fromkeys(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _check_name(cls, name: str, value: object) -> None:
        if name in cls.unsupported:
            neutral = cls.unsupported[name]
            if value is not None and not any(_same(value, one) for one in neutral):
                allowed = " or ".join(["null", *map(preview, neutral)])
                raise fault(
                    name,
                    "{field} is not supported by this server: got {value}, only "
                    f"{allowed} is accepted.",
                )
        elif name not in cls.names():
            raise fault(name, f'Unknown field "{{field}}"{cls._hint(name)}')

    @classmethod
    def _hint(cls, name: str) -> str:
        """Where a field of this name, or of one much like it, is at home."""
        if name in cls.elsewhere:
            return f": {cls.elsewhere[name]}."
        for near in difflib.get_close_matches(name, [*cls.names(), *cls.elsewhere], 1, NEAR):
            home = f", {cls.elsewhere[near]}" if near in cls.elsewhere else ""
            return f". Did you mean {preview(near)}{home}?"
        return "."

    def same_meaning(self, first: str, second: str) -> None:
        """Raise if both fields are given and differ."""
        one, other = getattr(self, first), getattr(self, second)
        if None not in (one, other) and one != other:
            raise fault(
                second,
                f"{first} and {{field}} mean the same and differ: {preview(one)} and {{value}}.",
            )


def whole(value: Any) -> Any:
    """2.0 as 2, also in lists and lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and {float, list} & set(map(type, value)):
        return [whole(one) for one in value]
    return value


def _same(value: object, neutral: object) -> bool:
    """Equality in which false is not 0 and an integer may equal a float."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
