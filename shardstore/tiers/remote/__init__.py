"""The root on remote storage: any fsspec URL. The only package that imports fsspec and its clients."""
