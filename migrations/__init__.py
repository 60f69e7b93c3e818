"""The history of the tables. `router/store/migrate.py` runs it; `python -m migrations NAME` writes the next step.

A step that is on main is never changed. Tests hold the sum of all steps against `router/store/schema.py`.
"""
