"""Report whether threads run Python code in parallel."""

from __future__ import annotations

import sys
import sysconfig

from flowchan.run.observe.windows import has_gil


def threads_line() -> str:
    """Return a line that says whether this Python's threads run Python code in parallel."""
    python = f"CPython {sysconfig.get_python_version()}{sys.abiflags}"
    if not has_gil():
        return f"threads run Python code in parallel on this {python}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return f"threads run Python code one at a time: the GIL of this {python} is enabled; set PYTHON_GIL=0"
    return f'threads run Python code one at a time on this {python}; on="process" runs it in parallel'
