"""netacct: who sent how many bytes to whom, per pod and namespace, exact to the byte."""

__version__ = "0.1.0"
