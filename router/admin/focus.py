"""Costs in the columns of FOCUS 1.2 (FinOps Open Cost and Usage Specification, June 2025), for tools that read it.

Tenants are billing accounts, projects sub accounts, each model two meters: input tokens and output tokens. A row is a
day of one meter. What has no price is no charge, and is left out. Columns that begin with x_ are ours.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from router.admin.report_formats import csv_text, money
from router.store.report_lines import Line, Report

BY = ("day", "tenant", "project", "model")
"""What the report has to be by."""
_PRICED_TOKENS = 10**6


def as_focus(report: Report) -> str:
    """CSV."""
    return csv_text(row for line in report.lines if line.currency for row in _rows(line))


def _rows(line: Line) -> Iterator[dict[str, Any]]:
    input_cost = line.cost - line.output_cost
    input_without_cache = line.cost_without_cache - line.output_cost
    if line.input_tokens:
        cached = line.tokens["cache_read"]
        yield _row(line, "input", line.input_tokens, input_cost, without_cache=input_without_cache, cached=cached)
    if line.output_tokens:
        yield _row(line, "output", line.output_tokens, line.output_cost, without_cache=line.output_cost, cached=0)


def _row(
    line: Line, direction: str, tokens: int, cost: Decimal, *, without_cache: Decimal, cached: int
) -> dict[str, Any]:
    day = datetime.date.fromisoformat(line.where["day"])
    month = day.replace(day=1)
    model, amount = line.where["model"], money(cost)
    return {
        "BilledCost": amount,
        "BillingAccountId": line.where["tenant"],
        "BillingAccountName": line.names["tenant"],
        "BillingAccountType": "Tenant",
        "BillingCurrency": line.currency,
        "BillingPeriodEnd": _start_of(month + datetime.timedelta(days=31), of_month=True),
        "BillingPeriodStart": _start_of(month),
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"{model}: {direction} tokens",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _start_of(day + datetime.timedelta(days=1)),
        "ChargePeriodStart": _start_of(day),
        "ConsumedQuantity": tokens,
        "ConsumedUnit": "Tokens",
        "ContractedCost": amount,
        "EffectiveCost": amount,
        "InvoiceIssuerName": "warmroute",
        "ListCost": amount,
        "PricingCategory": "Standard",
        "PricingQuantity": money(Decimal(tokens) / _PRICED_TOKENS),
        "PricingUnit": f"{_PRICED_TOKENS} Tokens",
        "ProviderName": "warmroute",
        "PublisherName": "warmroute",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"{model}/{direction}",
        "SkuMeter": f"{direction.capitalize()} tokens",
        "SubAccountId": line.where["project"],
        "SubAccountName": line.names["project"],
        "SubAccountType": "Project",
        "x_Model": model,
        "x_Requests": line.requests if direction == "input" else None,
        "x_CacheReadTokens": cached,
        "x_CostWithoutCache": money(without_cache),
    }


def _start_of(day: datetime.date, *, of_month: bool = False) -> str:
    return f"{day.replace(day=1) if of_month else day}T00:00:00Z"
