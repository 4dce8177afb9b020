"""Numbers in fewer bits: transforms of the plain model. int8, int4, NF4, int8 K/V."""
