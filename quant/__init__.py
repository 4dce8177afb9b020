"""Numbers in fewer bits: transforms of the plain model. Empty until the int8 work lands."""
