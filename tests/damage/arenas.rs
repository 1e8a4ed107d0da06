//! Arenas: files that a process has left in shared memory.

use crate::Outcome;
use crate::harm::{Draw, harm, overwrite};
use crate::memory::within;
use evermoe::Error;
use evermoe::snapshot::{Arena, Layout};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes before the list of units, and of the fields before the checksum.
const HEADER: usize = 192;
const FIELDS: usize = 40;
/// States of the two buffers.
const STATES: [usize; 3] = [64, 128, 192];
const PAGE: usize = 4096;
/// Memory limit for opening an arena with few units.
const MAX_BYTES: usize = 1 << 20;
/// The longest list of units.
const MAX_NAMES: u64 = 64 << 20;

/// An arena as it was left, and the state of each version in it.
struct Made {
    file: Vec<u8>,
    layout: Layout,
    versions: BTreeMap<u64, Vec<Vec<u8>>>,
}

fn folder() -> TempDir {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { tempfile::tempdir_in(shared).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn content(version: u64, unit: usize, bytes: usize) -> Vec<u8> {
    let mut draw = Draw::new("content", version.wrapping_mul(31).wrapping_add(unit as u64));
    (0..bytes).map(|_| draw.word() as u8).collect()
}

fn write(arena: &Arena, version: u64) -> Vec<Vec<u8>> {
    let index = arena.begin(version);
    let start = arena.buffer(index).unwrap();
    let mut written = Vec::new();
    for (number, unit) in arena.layout().units().iter().enumerate() {
        let bytes = content(version, number, unit.bytes);
        // SAFETY: the unit lies in the buffer, and nothing else uses the arena of this test.
        unsafe { start.add(unit.offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        written.push(bytes);
    }
    arena.commit(index).unwrap();
    written
}

fn make(folder: &Path, units: &[(&str, usize)], versions: &[u64], is_writing: bool) -> Made {
    let path = folder.join("made");
    let units: Vec<_> = units.iter().map(|&(name, bytes)| (name.to_owned(), bytes)).collect();
    let arena = Arena::create(&path, "{\"generation\": 3}", &units).unwrap();
    let written = versions.iter().map(|&version| (version, write(&arena, version))).collect();
    if is_writing {
        arena.begin(u64::MAX);
    }
    let file = fs::read(&path).unwrap();
    arena.unlink().unwrap();
    Made { file, layout: arena.layout().clone(), versions: written }
}

fn makes(folder: &Path) -> Vec<Made> {
    let mut made = Vec::new();
    for units in [&[("dense", 1000), ("empty", 0), ("moe.experts.1", 5000)][..], &[("a", 40)], &[]] {
        for (versions, is_writing) in [
            (&[5, 6][..], false),
            (&[3 << 40 | 7, 3 << 40 | 8], false),
            (&[9, 10], true),
            (&[11], false),
            (&[], true),
        ] {
            made.push(make(folder, units, versions, is_writing));
        }
    }
    made
}

fn open(path: &Path, most_bytes: usize) -> Option<Arena> {
    match within(most_bytes, || Arena::open(path)) {
        Ok(arena) => Some(arena),
        Err(Error::Corrupt { problem, .. }) if problem.contains("not a complete arena") => None,
        Err(other) => panic!("expected it to be corrupt, got {other:?}"),
    }
}

fn unit(arena: &Arena, index: usize, number: usize) -> Vec<u8> {
    let unit = &arena.layout().units()[number];
    // SAFETY: the unit lies in the buffer, and nothing writes the arena meanwhile.
    unsafe { std::slice::from_raw_parts(arena.buffer(index).unwrap().add(unit.offset), unit.bytes) }.to_vec()
}

/// Arenas whose header, states, digests or bytes of units are damaged or exchanged with another arena's.
pub(super) fn damaged() -> impl FnMut(&mut Draw) -> Outcome {
    let folder = folder();
    let makes = makes(folder.path());
    move |draw| {
        let path = folder.path().join("damaged");
        let (made, other) = (draw.pick(&makes), draw.pick(&makes));
        let mut file = made.file.clone();
        match draw.below(20) {
            0 => return vast(draw, &path, made),
            1..8 => file = harm(draw, &file, &other.file),
            8..12 => exchange(draw, &mut file, made, other),
            _ => {
                let (from, to) = *draw.pick(&regions(made));
                overwrite(draw, &mut file[from..to]);
            }
        }
        fs::write(&path, &file).unwrap();
        let Some(arena) = open(&path, MAX_BYTES) else { return Outcome::Refused };
        assert!(arena.layout() == &made.layout || arena.layout() == &other.layout);
        check(&arena, made, other)
    }
}

/// Every version that the arena shows was written, except for units that do not match their digests.
fn check(arena: &Arena, made: &Made, other: &Made) -> Outcome {
    let (mut is_whole, mut shown) = (true, 0);
    for (index, version) in arena.versions() {
        let written: Vec<_> = [made, other].iter().filter_map(|made| made.versions.get(&version)).collect();
        assert!(!written.is_empty(), "version {version} was never written");
        let wrong = arena.verify(index).unwrap();
        assert_eq!(arena.digests(index).unwrap().len(), arena.layout().units().len());
        for (number, each) in arena.layout().units().iter().enumerate() {
            let found = unit(arena, index, number);
            let is_same = written.iter().any(|units| units.get(number) == Some(&found));
            assert!(
                is_same || wrong.contains(&each.name),
                "{} is said to be of version {version}",
                each.name
            );
        }
        (is_whole, shown) = (is_whole && wrong.is_empty(), shown + 1);
    }
    let again = write(arena, 1 << 50);
    let (index, version) = arena.versions()[0];
    assert_eq!((version, arena.verify(index).unwrap().len()), (1 << 50, 0), "it can be used again");
    assert!((0..again.len()).all(|number| unit(arena, index, number) == again[number]));
    if is_whole && shown == made.versions.len().min(2) { Outcome::Same } else { Outcome::Refused }
}

/// Regions of an arena: fields, states, list of units, and each buffer's digests and units.
fn regions(made: &Made) -> Vec<(usize, usize)> {
    let buffer = (made.file.len() - PAGE) / 2;
    let mut found = vec![(0, 48), (STATES[0], STATES[1]), (STATES[1], STATES[2]), (HEADER, HEADER + 60)];
    for start in [PAGE, PAGE + buffer] {
        found.push((start, start + 8 * made.layout.units().len() + 8));
        found.push((start, start + made.layout.payload_bytes()));
    }
    found.retain(|(from, to)| from < to);
    found
}

/// Overwrites one part with another one, of the same arena or of another.
fn exchange(draw: &mut Draw, file: &mut [u8], made: &Made, other: &Made) {
    let (from, to) = *draw.pick(&regions(made));
    let source = if draw.one_in(2) { &made.file } else { &other.file };
    let (start, end) = if draw.one_in(2) { (from, to) } else { *draw.pick(&regions(made)) };
    if end - start == to - from && end <= source.len() {
        file[from..to].copy_from_slice(&source[start..end]);
    }
}

/// A large file whose header claims too much.
fn vast(draw: &mut Draw, path: &Path, made: &Made) -> Outcome {
    fs::write(path, &made.file).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let bytes = 1 << (20 + draw.below(6));
    file.set_len(bytes).unwrap();
    file.write_all_at(&bytes.to_le_bytes(), 32).unwrap();
    let descriptor = if draw.one_in(2) { draw.extreme() } else { bytes - draw.word() % 5000 };
    file.write_all_at(&descriptor.to_le_bytes(), 16).unwrap();
    assert!(open(path, MAX_BYTES).is_none());
    Outcome::Refused
}

/// Arenas of a writer with other rules, with a header that matches its checksum.
pub(super) fn sealed() -> impl FnMut(&mut Draw) -> Outcome {
    let folder = folder();
    let makes = makes(folder.path());
    move |draw| {
        let path = folder.path().join("sealed");
        let (made, other) = (draw.pick(&makes), draw.pick(&makes));
        let mut head = made.file[..HEADER].to_vec();
        let descriptor = if draw.one_in(4) { list(made) } else { harm(draw, &list(made), &list(other)) };
        if draw.one_in(2) {
            overwrite(draw, &mut head[16..FIELDS]);
        }
        if draw.one_in(2) {
            head[16..24].copy_from_slice(&(descriptor.len() as u64).to_le_bytes());
        }
        let sum = xxh3_64(&[&head[..FIELDS], &xxh3_64(&descriptor).to_le_bytes()].concat());
        head[FIELDS..FIELDS + 8].copy_from_slice(&sum.to_le_bytes());
        head.extend(&descriptor);
        let said = u64::from_le_bytes(*head[32..].first_chunk().unwrap());
        fs::write(&path, &head).unwrap();
        let bytes = if said <= 1 << 34 && draw.one_in(2) { said } else { made.file.len() as u64 };
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        // Consistent sizes are read up to the limit on names.
        let most = MAX_BYTES + 2 * bytes.min(MAX_NAMES) as usize;
        let Some(arena) = open(&path, most) else { return Outcome::Refused };
        assert_eq!(arena.layout().file_bytes() as u64, bytes);
        assert_eq!(described(arena.layout()), descriptor);
        Outcome::Same
    }
}

/// The list of units, as it is in the file.
fn list(made: &Made) -> Vec<u8> {
    described(&made.layout)
}

fn described(layout: &Layout) -> Vec<u8> {
    let mut bytes = Vec::new();
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    text(&mut bytes, layout.meta());
    for unit in layout.units() {
        text(&mut bytes, &unit.name);
        bytes.extend((unit.bytes as u64).to_le_bytes());
    }
    bytes
}
