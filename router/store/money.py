"""Money in the database: whole numbers of 1e-12 of the currency's unit.

Neither SQLite nor a sum in floating point keeps decimals exactly. A price has at most 6 decimals for a million tokens
(DeepSeek's 0.006 has 3), so that the price of a token is a whole number here, and so is every cost. 64 bits hold 9.2
million units in a row; sums over rows go beyond, and are taken in two parts (`reports.py`).
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, Dialect
from sqlalchemy.types import TypeDecorator

PARTS = 10**12
"""Of a unit of money: what is kept are whole numbers of them."""


class Money(TypeDecorator[Decimal]):
    """A Decimal in Python, a BIGINT of 1e-12 in the database."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> Any:
        return None if value is None else int((Decimal(value) * PARTS).to_integral_value())

    def process_result_value(self, value: Any, dialect: Dialect) -> Decimal | None:
        return None if value is None else Decimal(int(value)) / PARTS


def plain(money: Decimal) -> str:
    """2.49, never 2.490000000000 or 1E+1."""
    text = f"{money:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
