"""Stores on S3 and what speaks its protocol: `s3://bucket/prefix`."""
