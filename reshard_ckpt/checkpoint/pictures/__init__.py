"""How does a checkpoint look? Each picture is a function from plain data to a `Scene`, which is written as SVG, HTML or PNG.

Only PNG needs matplotlib, and only `raster` imports it.
"""
