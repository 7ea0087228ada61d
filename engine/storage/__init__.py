"""Files on any URL. Needs no torch.

checksums     checksums of files, and JSON documents that end with a checksum of themselves
draft         a local file that is written to a draft first, so that its path always holds a whole file
fsspec_store  any fsspec URL as a store
listing       the names and sizes of the files in a folder, to compare with later
local         local folders as a store: rename and link are atomic, and fsync makes them durable
retry         a call to a store that does not answer is repeated, with growing pauses, for a limited time
s3            S3 and compatible servers, through s3fs: conditional puts, multipart uploads, errors explained
store         where the files of a run live
urls          URLs of stores, as text: made absolute, and their faults
verification  files and documents, read and compared with their checksums

Tests: tests/unit/storage, tests/faults/test_full_disk.py
"""
