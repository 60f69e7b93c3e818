"""All the SQL. Tables are in `schema.py`, their history in `migrations/`; one file for each kind of thing that is kept.

Ids are text with a prefix that tells the kind (`ids.py`). Times are seconds since 1970 UTC, days and hours are counted
from there. Money is a whole number of 1e-12 of the currency's unit (`money.py`), and a Decimal everywhere else.
"""
