"""Failures of the published suites show what was compared."""

import pytest

pytest.register_assert_rewrite("shardstore.testing.contract", "shardstore.testing.rootcontract")
