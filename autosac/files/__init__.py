"""Files: written whole or not at all, read within bounds, checked against classes (`schema`), temporary ones removed."""
