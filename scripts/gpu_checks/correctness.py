"""Stage `correctness`: every kernel against float64, before anything is timed."""

from __future__ import annotations

from scripts.gpu_checks import attention_checks, flash_checks, product_checks, writing_checks
from scripts.gpu_checks.case import Case
from scripts.gpu_checks.session import Session


def cases(session: Session) -> list[Case]:
    """The checks of all kernels, so ordered that each kernel's first come first."""
    lists = [module.checks(session.implementation, session.options.rehearse) for module in MODULES]
    checks = [check for checks in lists for check in checks[:LEADING]]
    checks += [check for checks in lists for check in checks[LEADING:]]
    return [check.case() for check in checks]


MODULES = (attention_checks, writing_checks, product_checks, flash_checks)
LEADING = 12
