<%
def code(lines):
    return "\n".join(line for line in lines.splitlines() if "###" not in line).strip()
%>"""${message}"""

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    ${code(upgrades)}
% if down_revision is None:
    op.execute("INSERT INTO changes (id, revision) VALUES (1, 0)")
% endif


def downgrade() -> None:
    ${code(downgrades)}
