"""Real storage servers on loopback, started by the tests that ask for them, and a proxy with faults.

Fixtures (session-scoped, started at first use): `s3_server` (moto), `deviant_s3_server` (rclone, which ignores
exclusive create), `azure_server` (Azurite), `gcs_server` (fake-gcs-server), `sftp_server` (OpenSSH).
"""
