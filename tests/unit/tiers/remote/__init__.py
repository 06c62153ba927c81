import pytest

pytest.register_assert_rewrite("tests.unit.tiers.remote.store_suite")
