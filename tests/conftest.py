"""What every test run shares: the plugins, and the Hypothesis profiles.

`gate` draws the same examples in every run; `fresh` (`--tier=slow --hypothesis-profile=fresh`) draws new ones and more
of them, prints how to repeat a failure, and keeps failures in .hypothesis. The order of the tests is random; its seed
stands in the header and `--randomly-seed=N` repeats it. Knows nothing about any package.
"""

from hypothesis import settings

pytest_plugins = ["pytester", "tests.plugins.tiers", "tests.plugins.guard", "tests.plugins.quarantine"]

settings.register_profile("gate", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("fresh", derandomize=False, deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("gate")
