#!/usr/bin/env bash
# Unpacks packages of Debian's testing suite, and all that they need, into a folder; nothing is installed.
#   debian.sh FOLDER "PACKAGE[:ARCHITECTURE] ..." "PROGRAM ..."    then FOLDER/bin/PROGRAM runs, with its own libraries
# For compilers newer than this machine's. Needs a Debian of x86-64, of any age, and its mirror.
set -euo pipefail
folder=$(realpath -m "$1") packages=$2 programs=$3
root=$folder/root
for program in $programs; do test -x "$folder/bin/$program" || missing=1; done
test -n "${missing:-}" || exit 0

mkdir -p "$folder"/{state/lists/partial,cache/archives/partial,bin} "$root"/usr/lib{,64}
ln -sfn usr/lib "$root/lib"
ln -sfn usr/lib64 "$root/lib64"
: > "$folder/status"
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/$')
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror testing main" > "$folder/sources.list"
cat > "$folder/apt.conf" <<CONF
Dir::State "$folder/state"; Dir::State::status "$folder/status"; Dir::Cache "$folder/cache";
Dir::Etc::sourcelist "$folder/sources.list"; Dir::Etc::sourceparts "/dev/null";
APT::Architecture "amd64"; APT::Architectures { "amd64"; "arm64"; }; APT::Install-Recommends "0"; APT::Sandbox::User "";
CONF
export APT_CONFIG=$folder/apt.conf
apt-get -qq update
# shellcheck disable=SC2086
apt-get -qq -y --download-only install $packages > "$folder/log"
for package in "$folder"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -rf "$folder/cache" "$folder/state"
for program in $programs; do
  cat > "$folder/bin/$program" <<RUN
#!/bin/sh
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/$program" "\$@"
RUN
  chmod +x "$folder/bin/$program"
done
