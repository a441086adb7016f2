#!/usr/bin/env bash
# The tests, as the README says to run them; doc tests are among them.
source "$(dirname "$0")/env.sh"

cargo test
