"""Files of ``torch.save``: their zips and pickles, read and written without running any code in them."""
