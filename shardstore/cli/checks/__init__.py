"""What `shardstore doctor` looks at: host memory, process limits, the root, speeds. Each by itself."""
