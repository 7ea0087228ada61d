"""Files on any URL. Needs no torch.

checksums     what a file must be, and JSON documents that end with one
draft         a local file that is written beside its place, so that what stands there is whole, or the one before
fsspec_store  any fsspec URL as a store
listing       what a folder holds, by names and sizes: a small manifest to compare with later
local         local folders as a store: rename and link are atomic, fsync makes them last
retry         a store that does not answer is asked again, ever more slowly, until it has been waited for long
              enough
s3            S3 and what speaks like it, through s3fs: conditional puts, uploads in parts, errors explained
store         where the files of a run live
"""
