"""Object stores: one back-end over a small asynchronous service, of which there are two, S3 and GCS.

`backend.py` keeps the promises of `Backend`; `s3.py` and `gcs.py` speak to the services, through the sessions and
credentials of s3fs and gcsfs, and turn every answer into a value or an error of `errors.py`. Requests go one by one and
are never tried again here: that is `RetryBackend`'s, which knows the deadline. Nothing here reads the environment;
the libraries do, by their own conventions (`AWS_*`, `~/.aws/`, `GOOGLE_APPLICATION_CREDENTIALS`, `FSSPEC_*`).
"""
