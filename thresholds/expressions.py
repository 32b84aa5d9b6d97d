"""Limits as small arithmetic expressions, such as ``min(1.5 + .75*g, 1 + .35*(c - 1))``.

Variables: N experts, k picks per token, CF capacity factor, c = N/k (the largest load in fair shares that
top-k allows), g = clip((log2 N - 3)/3, 0, 1) (0 up to 8 experts, 1 from 64). Functions: min, max, log2, clip.
Nothing is ever executed: the syntax tree is walked and anything else in it is refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from moe_audit.thresholds.errors import UsageError
from moe_audit.thresholds.gate_names import nearest

VARIABLES = ("N", "k", "CF", "c", "g")
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, tuple[int | None, Callable[..., float]]] = {  # number of arguments; None: two and more
    "min": (None, min),
    "max": (None, max),
    "log2": (1, math.log2),
    "clip": (3, lambda x, low, high: min(max(x, low), high)),
}
_MAX_LENGTH = 300


def variables(num_experts: int, top_k: int | None, capacity_factor: float | None) -> dict[str, float]:
    """The variables of one layer. A varying number of picks counts as k = 1, which gives the loosest c."""
    k = top_k or 1
    values = {
        "N": float(num_experts),
        "k": float(k),
        "c": num_experts / k,
        "g": min(max((math.log2(num_experts) - 3) / 3, 0.0), 1.0),
    }
    if capacity_factor is not None:
        values["CF"] = float(capacity_factor)
    return values


@lru_cache(maxsize=512)
def parse(text: str) -> ast.expr:
    """The checked syntax tree of a limit.

    Raises:
        UsageError: it is no arithmetic, or names something unknown.
    """
    if len(text) > _MAX_LENGTH:
        raise UsageError(
            f"a limit of {len(text)} characters is too long", f"keep it under {_MAX_LENGTH} characters"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"{text!r} is no arithmetic expression", "for example 1.5 + 0.75*g, or a number"
        ) from error
    _check(tree, text)
    return tree


@lru_cache(maxsize=512)
def names(text: str) -> frozenset[str]:
    """The variables that an expression uses."""
    return frozenset(n.id for n in ast.walk(parse(text)) if isinstance(n, ast.Name) and n.id in VARIABLES)


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """The value of an expression.

    Raises:
        UsageError: a division by zero, a logarithm of no positive number, or a result that is not finite.
    """
    try:
        result = _value(parse(text), values)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise UsageError(f"{text!r} has no value at {_shown(values)}: {error}") from error
    if not math.isfinite(result):
        raise UsageError(f"{text!r} is {result} at {_shown(values)}", "a limit is a finite number")
    return result


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            return
        case ast.Name(id=name):
            if name not in VARIABLES:
                raise UsageError(
                    f"{name!r} in {text!r} is no variable", nearest(name, (*VARIABLES, *_FUNCTIONS))
                )
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check(left, text)
            _check(right, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in _FUNCTIONS:
                raise UsageError(f"{name!r} in {text!r} is no function", nearest(name, _FUNCTIONS))
            wanted = _FUNCTIONS[name][0]
            if (len(args) != wanted) if wanted else (len(args) < 2):
                raise UsageError(
                    f"{name} in {text!r} takes {wanted or 'two or more'} arguments, not {len(args)}"
                )
            for argument in args:
                _check(argument, text)
        case _:
            raise UsageError(
                f"{ast.unparse(node)!r} in {text!r} is not allowed in a limit",
                "numbers, N, k, CF, c, g, + - * /, min, max, log2 and clip are",
            )


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=op, operand=operand):
            value = _value(operand, values)
            return -value if isinstance(op, ast.USub) else value
        case ast.BinOp(left=left, op=binary, right=right):
            return _OPERATORS[type(binary)](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id=name), args=args):
            return float(_FUNCTIONS[name][1](*(_value(a, values) for a in args)))
    raise AssertionError(ast.dump(node))  # parse() let nothing else through


def _shown(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {values[name]:g}" for name in VARIABLES if name in values)
