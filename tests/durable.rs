//! Files that are written around the page cache, through the Rust API.

use evermoe::Error;
use evermoe::durable::{Content, write, write_hashed};
use evermoe::snapshot::digest;
use std::fs;
use std::path::Path;

const BLOCK: usize = 4 << 20;

/// Bytes that differ from block to block.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8 ^ (at / BLOCK) as u8).collect()
}

#[test]
fn files_of_all_sizes_around_blocks_and_pages_have_their_bytes() {
    // On a disk, and in memory, where some systems do not support direct writes.
    let folders = [Some(env!("CARGO_TARGET_TMPDIR")), Path::new("/dev/shm").is_dir().then_some("/dev/shm")];
    for folder in folders.into_iter().flatten() {
        let folder = tempfile::tempdir_in(folder).unwrap();
        for size in [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4097] {
            let content = bytes(size);
            for (threads, cut) in [(0, 1000), (1, 3), (4, 1 << 20), (64, 5 << 20)] {
                let path = folder.path().join(format!("{size}-{threads}"));
                write(&path, &Content::new(content.chunks(cut)), threads).unwrap();
                assert!(fs::read(&path).unwrap() == content, "{} differs", path.display());
                fs::remove_file(path).unwrap();
            }
        }
    }
}

#[test]
fn digests_are_made_meanwhile() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (content, path) = (bytes(BLOCK + 5), folder.path().join("file"));
    let units: Vec<&[u8]> = content.chunks(1 << 20).collect();
    let made = write_hashed(&path, &Content::new(units.iter().copied()), 4, &units).unwrap();
    assert_eq!(made, units.iter().map(|unit| digest(unit)).collect::<Vec<_>>());
    assert!(fs::read(&path).unwrap() == content);
    write_hashed(&path, &Content::new(units.iter().copied()), 4, &units).unwrap_err();
}

#[test]
fn what_is_there_stays_and_what_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let existing = folder.path().join("existing");
    fs::write(&existing, "old").unwrap();
    std::os::unix::fs::symlink(&existing, folder.path().join("link")).unwrap();
    for name in ["existing", "link", "missing/file"] {
        let path = folder.path().join(name);
        let error = write(&path, &Content::new([&b"new"[..]]), 2).unwrap_err();
        assert!(
            matches!(&error, Error::Io { .. }) && error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
    assert_eq!(fs::read(&existing).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}
