"""The admin API on port 4001: what the fleet does, who may use it, and what it costs."""

from __future__ import annotations

import datetime
from functools import partial

from fastapi import APIRouter, Depends, FastAPI

from router import __version__
from router.admin.access import Access, Needs
from router.admin.answers import ANY_ERROR, render_errors
from router.admin.api_keys import keys_router
from router.admin.audit import audit_router
from router.admin.desk import Desk, refuse_nul
from router.admin.isolation import isolation_router
from router.admin.live import health_router, live_router
from router.admin.models import models_router
from router.admin.own import own_router
from router.admin.projects import projects_router
from router.admin.reports import reports_router
from router.admin.rules import costs_router, limits_router, prices_router
from router.admin.shims.litellm import litellm_router
from router.admin.shims.litellm_spend import spend_router
from router.admin.shims.openai import organization_router
from router.admin.tenants import tenants_router
from router.core import Live
from router.store.isolation import tenant_rules

OPEN = Access(None, pepper=b"")
_PREFIX = "/admin/v1"
_MOST_BODY_BYTES = 16 << 20  # read before anybody is asked who they are; the largest are of `explain`


def create_app(
    live: Live | None, desk: Desk | None = None, access: Access = OPEN, *, metrics_open: bool = True
) -> FastAPI:
    """The ASGI application.

    live: None where no gateway runs. desk: None where there is no database, and then no tenants, keys and reports.
    """
    app = FastAPI(
        title="warmroute admin",
        version=__version__,
        description="What the fleet holds and does, why each request went where it went, who may ask, what it cost."
        " Examples leave out what is null.",
        docs_url=None,  # its page would load scripts from a CDN; the schema is at /openapi.json
        redoc_url=None,
        responses=ANY_ERROR,
        max_body_size=_MOST_BODY_BYTES,
        dependencies=[Depends(refuse_nul)],
    )
    render_errors(app)
    needs = Needs(access)
    if live is not None:
        app.include_router(health_router(live, [] if metrics_open else [needs("fleet:read", all_tenants=True)]))
        app.include_router(live_router(live, needs), prefix=_PREFIX)
        app.include_router(models_router(live, desk, needs), prefix=_PREFIX)
    if desk is not None:
        app.include_router(_accounts(desk, needs), prefix=_PREFIX)
        app.include_router(litellm_router(desk, needs, live))
        app.include_router(spend_router(desk, needs, _today))
        app.include_router(own_router(desk, _today))
        if live is not None:
            report = isolation_router(live, partial(tenant_rules, desk.database))
            right = [needs("isolation:read", all_tenants=True)]
            app.include_router(report, prefix=f"{_PREFIX}/isolation", dependencies=right)
    return app


def _accounts(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter()
    router.include_router(tenants_router(desk, needs), prefix="/tenants")
    router.include_router(
        tenants_router(desk, needs), prefix="/organizations", include_in_schema=False
    )  # OpenAI's word
    router.include_router(projects_router(desk, needs), prefix="/projects")
    router.include_router(keys_router(desk, needs), prefix="/keys")
    router.include_router(limits_router(desk, needs), prefix="/limits")
    router.include_router(prices_router(desk, needs), prefix="/prices")
    router.include_router(costs_router(desk, needs), prefix="/instance-costs")
    router.include_router(reports_router(desk, needs), prefix="/reports")
    router.include_router(organization_router(desk, needs))
    router.include_router(audit_router(desk, needs), prefix="/audit")
    return router


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
