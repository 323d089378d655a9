"""What is wrong with this set-up?"""

from largebatch.audit.findings import CODES, Code, Finding
from largebatch.audit.inspect import inspect
from largebatch.audit.watch import watch

__all__ = ["CODES", "Code", "Finding", "inspect", "watch"]
