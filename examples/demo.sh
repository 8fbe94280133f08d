#!/bin/sh
# The main job, on the small trained model in this folder: plan, split for two ranks, verify, merge, compare, run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
ln -s "$here/demo-model" demo-model

show() {
    printf '\n$'
    for word; do
        case $word in
            *' '*) printf ' "%s"' "$word" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    "$@"
}

show shardconv plan demo-model --tp 2
show shardconv split demo-model --tp 2
show ls -l demo-model-tp2
show shardconv verify demo-model-tp2 --against demo-model
show shardconv merge demo-model-tp2
show cmp demo-model-merged/model.safetensors demo-model/model.safetensors
show diff -r demo-model-merged demo-model/
printf '\nThe merged folder has the bytes of the source.\n'
show shardconv run demo-model-tp2 --prompt "An exception is" --max-new-tokens 24 --device cpu --check demo-model
