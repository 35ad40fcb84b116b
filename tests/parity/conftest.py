"""Settings of the tests against transformers; see `make parity`."""

import os

# Nothing is fetched: models are made here.
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'
