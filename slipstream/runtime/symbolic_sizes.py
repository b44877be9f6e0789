"""Sizes of a recorded call, as numbers that know how they follow from the shapes of its arguments.

Recorded code computes grids, offsets and shapes with them as with integers. Each operation becomes
a line of the record (`let`), and each decision a guard: a record holds for all sizes at which the
same comparisons come out alike. Whatever wants a plain integer, such as torch, `range` or a dict,
calls __index__ or __hash__, and the record then holds for that value alone. So nothing that depends
on a size can go unnoticed.
"""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Book(Protocol):
    """The book that lines and guards are written into: runtime/call_recorder.py."""

    def let(self, text: str, value: int, late: bool) -> "Size": ...

    def guard(self, text: str, late: bool) -> None: ...


def _arithmetic(operation: Callable, form: str) -> Any:
    """The method of an operator; form: its text, of this operand and the other."""
    return lambda self, other: self._binary(other, operation, form)


def _comparison(operation: Callable, true: str, false: str) -> Any:
    """The method of a comparison, and its text where it holds and where it does not."""
    return lambda self, other: self._compare(other, operation, true, false)


class Size(torch.SymInt):
    """An integer of a recorded call. torch takes it for one of its own kind, whose value it does
    not ask for before a mode has seen the call.

    Attributes:
        value: of this call. text: in the record. late: it is known only after some steps.
    """

    def __init__(self, book: Book, text: str, value: int, late: bool = False) -> None:
        self.book, self.text, self.value, self.late = book, text, value, late

    def _binary(self, other: Any, operation: Callable, form: str) -> Any:
        if isinstance(other, bool | float):
            return operation(self.__index__(), other)
        if not isinstance(other, int | Size):
            return NotImplemented
        value = operation(self.value, value_of(other))
        late = self.late or (isinstance(other, Size) and other.late)
        return self.book.let(form.format(self.text, text_of(other)), value, late)

    __add__ = __radd__ = _arithmetic(operator.add, "{0} + {1}")
    __sub__ = _arithmetic(operator.sub, "{0} - {1}")
    __rsub__ = _arithmetic(lambda x, y: y - x, "{1} - {0}")
    __floordiv__ = _arithmetic(operator.floordiv, "{0} // {1}")
    __rfloordiv__ = _arithmetic(lambda x, y: y // x, "{1} // {0}")
    __mod__ = _arithmetic(operator.mod, "{0} % {1}")
    __rmod__ = _arithmetic(lambda x, y: y % x, "{1} % {0}")
    __lshift__ = _arithmetic(operator.lshift, "{0} << {1}")
    __rlshift__ = _arithmetic(lambda x, y: y << x, "{1} << {0}")
    __rshift__ = _arithmetic(operator.rshift, "{0} >> {1}")
    __and__ = __rand__ = _arithmetic(operator.and_, "{0} & {1}")
    __or__ = __ror__ = _arithmetic(operator.or_, "{0} | {1}")

    def __mul__(self, other: Any) -> Any:
        if other is True or other is False:  # of a flag: tokens * packed
            return self if other else 0
        return self._binary(other, operator.mul, "{0} * {1}")

    __rmul__ = __mul__

    def __neg__(self) -> "Size":
        return self.book.let(f"-{self.text}", -self.value, self.late)

    def __abs__(self) -> "Size":
        return self.book.let(f"abs({self.text})", abs(self.value), self.late)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def bit_length(self) -> "Size":
        return self.book.let(f"{self.text}.bit_length()", self.value.bit_length(), self.late)

    def _compare(self, other: Any, operation: Callable, true: str, false: str) -> Any:
        if not isinstance(other, int | Size):
            if not isinstance(other, float):
                return NotImplemented
            return operation(int(self), other)
        result = operation(self.value, value_of(other))
        late = self.late or (isinstance(other, Size) and other.late)
        self.book.guard(f"{self.text} {true if result else false} {text_of(other)}", late)
        return result

    def __eq__(self, other: Any) -> Any:
        return self is other or self._compare(other, operator.eq, "==", "!=")

    def __ne__(self, other: Any) -> Any:
        return self is not other and self._compare(other, operator.ne, "!=", "==")

    __lt__ = _comparison(operator.lt, "<", ">=")
    __le__ = _comparison(operator.le, "<=", ">")
    __gt__ = _comparison(operator.gt, ">", "<=")
    __ge__ = _comparison(operator.ge, ">=", "<")

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """The value, for which alone the record then holds."""
        self.book.guard(f"{self.text} == {self.value}", self.late)
        return self.value

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __str__(self) -> str:
        return str(self.__index__())

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)

    def __truediv__(self, other: Any) -> float:
        return self.__index__() / other

    def __rtruediv__(self, other: Any) -> float:
        return other / self.__index__()

    def __pow__(self, other: Any) -> Any:
        return self.__index__() ** other

    def __repr__(self) -> str:
        return repr(self.value)  # in an error, which no record outlives


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Size) else x


def text_of(x: Any) -> str:
    return x.text if isinstance(x, Size) else repr(x)
