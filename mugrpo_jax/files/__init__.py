"""Files that survive a SIGKILL, on a local disk and on Google Cloud Storage (`gs://bucket/folder`)."""

from mugrpo_jax.files.bucket import plain_errors as plain_errors
from mugrpo_jax.files.bucket import replace_object as replace_object
from mugrpo_jax.files.line_files import LineFile as LineFile
from mugrpo_jax.files.line_files import cut_unfinished_line as cut_unfinished_line
from mugrpo_jax.files.line_files import read_json_lines as read_json_lines
from mugrpo_jax.files.line_files import read_json_object as read_json_object
from mugrpo_jax.files.storage import PATIENCE_S as PATIENCE_S
from mugrpo_jax.files.storage import absolute as absolute
from mugrpo_jax.files.storage import create as create
from mugrpo_jax.files.storage import discard as discard
from mugrpo_jax.files.storage import flush as flush
from mugrpo_jax.files.storage import is_remote as is_remote
from mugrpo_jax.files.storage import local_copy as local_copy
from mugrpo_jax.files.storage import make_folder as make_folder
from mugrpo_jax.files.storage import move_folder as move_folder
from mugrpo_jax.files.storage import names_below as names_below
from mugrpo_jax.files.storage import nearest_existing as nearest_existing
from mugrpo_jax.files.storage import publish as publish
from mugrpo_jax.files.storage import remove_folder as remove_folder
from mugrpo_jax.files.storage import scratch_folder as scratch_folder
from mugrpo_jax.files.storage import size as size
from mugrpo_jax.files.storage import temporary_for as temporary_for
from mugrpo_jax.files.storage import to_path as to_path
from mugrpo_jax.files.storage import wait_for as wait_for
from mugrpo_jax.files.storage import write_atomically as write_atomically
