"""The type checker that conftest.py puts on the package: beartype, to which an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
