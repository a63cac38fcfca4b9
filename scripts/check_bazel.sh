#!/usr/bin/env bash
# Load every target of BUILD with a real Bazel and run some tests: scripts/check_bazel.sh [test target ...]
# Works without network on Debian's bazel-bootstrap (4.2): stubs of the rule repositories re-export Bazel's own rules.
# So this covers BUILD (names, globs, deps, data, what a test finds in its sandbox), not the versions of the rules in
# MODULE.bazel. The python3 on PATH must have the package's dependencies: the environment of README.md, active.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
targets=("$@")
[ $# -gt 0 ] || targets=(//:tests_top //:tests_policy //:tests_repo //:tests_cli)
work=$(mktemp -d)
trap 'bazel --output_user_root="$work/output" shutdown >/dev/null 2>&1 || true; chmod -R u+w "$work"; rm -rf "$work"' EXIT

mkdir "$work/tree"
git -C "$root" ls-files -z | tar -C "$root" --null -T - -cf - | tar -C "$work/tree" -xf -
rm "$work/tree/MODULE.bazel"
stub() { # REPOSITORY FOLDER NAME...: a repository whose FOLDER/defs.bzl gives Bazel's own rules
    local folder=$work/$1/$2
    mkdir -p "$folder"
    touch "$work/$1/WORKSPACE" "$work/$1/BUILD" "$folder/BUILD"
    local rule
    for rule in "${@:3}"; do
        echo "$rule = getattr(native, '$rule', None)"
    done >"$folder/defs.bzl"
    printf 'local_repository(name = "%s", path = "%s")\n' "$1" "$work/$1" >>"$work/tree/WORKSPACE"
}
stub rules_python python py_binary py_library py_runtime py_test
stub rules_cc cc cc_binary cc_import cc_library cc_proto_library cc_test cc_toolchain cc_toolchain_suite objc_library
stub rules_java java java_binary java_import java_library java_proto_library java_runtime java_toolchain
stub remote_coverage_tools none
printf 'filegroup(name = "%s", visibility = ["//visibility:public"])\n' coverage_report_generator lcov_merger \
    >"$work/remote_coverage_tools/BUILD"
stub rules_proto proto proto_lang_toolchain proto_library

cd "$work/tree"
run() { bazel --output_user_root="$work/output" "$@"; }
loaded=$(run query --noshow_progress '//...' 2>"$work/log") || {
    cat "$work/log" >&2
    exit 1
}
echo "targets loaded: $(wc -l <<<"$loaded")"
run test --noshow_progress --test_output=errors --test_env=PATH --test_env=JAX_PLATFORMS=cpu --test_env=HOME \
    --incompatible_strict_action_env=false --local_test_jobs=1 --test_timeout=900 "${targets[@]}"
