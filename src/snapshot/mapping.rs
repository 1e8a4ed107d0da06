//! The file of an arena: made whole or not at all, opened, mapped.

use super::layout::{HEADER, Layout, descriptor_bytes};
use crate::error::{Error, Result};
use memmap2::MmapRaw;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Makes the file under a temporary name, reserves all its space, writes the header and then gives it its name.
///
/// With `later` only the header has its space, if all of it is free now; the rest, and all page faults, are for
/// [`Space::take`]. The file at `room` becomes the arena's, with the space that it has: its bytes are zero.
pub(super) fn create(
    path: &Path,
    layout: &Layout,
    later: bool,
    room: Option<&Path>,
) -> Result<(MmapRaw, Option<Space>)> {
    let failed = |error| Error::file("creating the arena", path, error);
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|error| Error::file("creating the folder", parent, error))?;
    }
    if path.symlink_metadata().is_ok() {
        let exists = io::Error::from_raw_os_error(libc::EEXIST);
        let context =
            format!("creating the arena {}: it exists; open it, or unlink it first", path.display());
        return Err(Error::Io { context, path: Some(path.to_owned()), source: exists });
    }
    let temporary = Temporary::new(path)?;
    let file = open_new(&temporary.0, room).map_err(failed)?;
    let mut space = Space { file, bytes: layout.file_bytes(), taken: 0, ready: 0 };
    space.shrink().map_err(failed)?;
    space.check(path)?;
    if later {
        space.file.set_len(space.bytes as u64).map_err(failed)?;
    } else {
        space.reserve(path, space.bytes)?;
    }
    space.file.write_all_at(&layout.encode(), 0).map_err(failed)?;
    let mapping = map(&space.file, path)?;
    if !later {
        populate(&mapping, 0, space.bytes);
    }
    // A hard link, unlike a rename, never replaces a file that another process has made meanwhile.
    fs::hard_link(&temporary.0, path).map_err(failed)?;
    Ok((mapping, later.then_some(space)))
}

/// A new file, or the one that is at `room`, which loses that name.
fn open_new(path: &Path, room: Option<&Path>) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match room {
        None => options.create_new(true).open(path),
        Some(room) => {
            fs::rename(room, path)?;
            options.custom_flags(libc::O_NOFOLLOW).open(path)
        }
    }
}

/// Opens and checks a file that [`create`] made.
pub(super) fn open(path: &Path) -> Result<(MmapRaw, Layout)> {
    let doing = |error| Error::file("opening the arena", path, error);
    let no_file =
        || Error::corrupt("not a whole arena: it is empty, or no file").of_object(path.display().to_string());
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP | libc::EISDIR | libc::ENXIO) => no_file(), // a link, a folder, a socket
        _ => doing(error),
    })?;
    let metadata = file.metadata().map_err(doing)?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Err(no_file());
    }
    let mapping = map(&file, path)?;
    let bytes = head(&file, mapping.len()).map_err(doing)?;
    let layout =
        Layout::decode(&bytes, mapping.len()).map_err(|error| error.of_object(path.display().to_string()))?;
    Ok((mapping, layout))
}

/// The header and the descriptor; without it where the header does not fit the file.
fn head(file: &File, file_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEADER.min(file_bytes)];
    file.read_exact_at(&mut bytes, 0)?;
    bytes.resize(bytes.len() + descriptor_bytes(&bytes, file_bytes), 0);
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn map(file: &File, path: &Path) -> Result<MmapRaw> {
    MmapRaw::map_raw(file).map_err(|error| Error::file("mapping the arena", path, error))
}

/// Takes the page faults here rather than in the first copies of a training step. A kernel before 5.14 refuses, and then
/// they come one by one, as they would without this.
fn populate(mapping: &MmapRaw, start: usize, bytes: usize) {
    #[cfg(target_os = "linux")]
    let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, start, bytes);
}

/// The space of a file that is not ready to be written: it does not have it yet, or its page faults are to come.
pub(super) struct Space {
    file: File,
    /// Of the whole file.
    bytes: usize,
    /// From the start on, so many have their space.
    taken: usize,
    /// Of these, so many have had their page faults.
    ready: usize,
}

impl Space {
    /// Makes at most so many bytes more of the first `end` ready, then reserves what is left of so many of the rest;
    /// whether all of the first are ready and all is reserved then. None of these may be written before.
    pub(super) fn take(&mut self, most: usize, end: usize, path: &Path, mapping: &MmapRaw) -> Result<bool> {
        let bytes = most.min(end.saturating_sub(self.ready));
        if bytes > 0 {
            self.reserve(path, self.ready + bytes)?;
            populate(mapping, self.ready, bytes);
            self.ready += bytes;
        }
        if self.ready >= end {
            self.reserve(path, self.bytes.min(self.taken.saturating_add(most - bytes)))?;
        }
        Ok(self.ready >= end && self.taken == self.bytes)
    }

    /// Whether nothing is left to do.
    pub(super) fn is_ready(&self) -> bool {
        self.ready == self.bytes
    }

    /// What the file has of its space already; it gives back what is more.
    fn shrink(&mut self) -> io::Result<()> {
        let found = self.file.metadata()?;
        if found.len() > self.bytes as u64 {
            self.file.set_len(self.bytes as u64)?;
        }
        let reserved = found.blocks().saturating_mul(512);
        let is_whole = reserved >= found.len();
        self.taken = if is_whole { self.bytes.min(usize::try_from(found.len()).unwrap_or(0)) } else { 0 };
        Ok(())
    }

    /// Gives the file its space up to `end`. A full file system is an error here and never a SIGBUS at a later write.
    fn reserve(&mut self, path: &Path, end: usize) -> Result<()> {
        if end <= self.taken {
            return Ok(());
        }
        let (start, length) = (self.taken as libc::off_t, (end - self.taken) as libc::off_t);
        // SAFETY: the descriptor is open for writing; the call touches no memory of ours.
        match unsafe { libc::posix_fallocate(self.file.as_raw_fd(), start, length) } {
            0 => {
                self.taken = end;
                Ok(())
            }
            code => Err(self.refused(path, code)),
        }
    }

    /// Whether so much is free.
    fn check(&self, path: &Path) -> Result<()> {
        if (self.bytes - self.taken) as u64 > free_bytes(&self.file) {
            return Err(self.refused(path, libc::ENOSPC));
        }
        Ok(())
    }

    fn refused(&self, path: &Path, code: i32) -> Error {
        let (bytes, free) = (self.bytes, free_bytes(&self.file));
        let needs =
            format!("reserving the arena {}: it needs {bytes} bytes and {free} are free", path.display());
        Error::Io {
            context: format!("{needs}; use a smaller arena or a larger folder"),
            path: Some(path.to_owned()),
            source: io::Error::from_raw_os_error(code),
        }
    }
}

fn free_bytes(file: &File) -> u64 {
    let mut stats = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `stats` is writable and large enough; it is read only if the call says that it filled it.
    unsafe {
        match libc::fstatvfs(file.as_raw_fd(), stats.as_mut_ptr()) {
            0 => stats.assume_init().f_bavail.saturating_mul(stats.assume_init().f_frsize),
            _ => u64::MAX,
        }
    }
}

/// The name under which a file is made; removed at the end, whether the file got its own name or not.
struct Temporary(PathBuf);

impl Temporary {
    /// Also removes what a process that was killed while it made the same arena has left.
    fn new(path: &Path) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let temporary = Self(name.into());
        match fs::remove_file(&temporary.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::file("removing", &temporary.0, error))
            }
            _ => Ok(temporary),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Nothing can be done about a failure here, and the next `create` of this arena removes the file.
        let _ = fs::remove_file(&self.0);
    }
}
