"""What every request cost, kept so that none is missing and none is there twice.

on the loop       Ledger ── an open mark at dispatch, the end before the answer's last byte ──> Spool (files)
in a thread       Spool ──> Reader ──> rows, priced ──> database, each once ──> roll-ups

The database is never waited for. While it is away the spool grows, up to a bound.
"""
