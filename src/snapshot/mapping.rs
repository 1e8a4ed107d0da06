//! The file of an arena: atomic creation, opening, mapping.

use super::layout::{HEADER, Layout, descriptor_bytes};
use crate::error::{Error, Result};
use memmap2::MmapRaw;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Creates the file under a temporary name, reserves all its space, writes the header and then gives it its final name.
///
/// With `later` only the header is reserved, provided that all space is free; [`Space::take`] reserves the rest and
/// takes all page faults. The file at `room` becomes the arena's, with its space: its bytes are zero.
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
            format!("creating the arena {}: the file exists; open it, or unlink it first", path.display());
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
    // A hard link, unlike a rename, never replaces a file that another process has created meanwhile.
    fs::hard_link(&temporary.0, path).map_err(failed)?;
    Ok((mapping, later.then_some(space)))
}

/// Opens a new file, or the one at `room`, which loses that name.
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
    let no_file = || {
        Error::corrupt("not a complete arena: it is empty, or no regular file")
            .of_object(path.display().to_string())
    };
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP | libc::EISDIR | libc::ENXIO) => no_file(), // a link, a folder or a socket
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

/// Reads the header and the descriptor; only the header if its sizes do not fit the file.
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

/// Takes the page faults now rather than in the first copies of a training step. A kernel before 5.14 refuses; then
/// they occur one by one, as they would without this.
fn populate(mapping: &MmapRaw, start: usize, bytes: usize) {
    #[cfg(target_os = "linux")]
    let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, start, bytes);
}

/// Space of a file that is not ready to be written: not reserved yet, or without page faults.
pub(super) struct Space {
    file: File,
    /// Size of the file.
    bytes: usize,
    /// Number of reserved bytes from the start.
    taken: usize,
    /// Number of these whose page faults were taken.
    ready: usize,
}

impl Space {
    /// Prepares at most `most` bytes of the first `end`, then reserves the rest of `most` beyond them. Returns whether
    /// the first `end` are ready and everything is reserved. Nothing may be written before.
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

    /// Counts the space that the file has already; releases the excess.
    fn shrink(&mut self) -> io::Result<()> {
        let found = self.file.metadata()?;
        if found.len() > self.bytes as u64 {
            self.file.set_len(self.bytes as u64)?;
        }
        let reserved = found.blocks().saturating_mul(512);
        let has_all = reserved >= found.len();
        self.taken = if has_all { self.bytes.min(usize::try_from(found.len()).unwrap_or(0)) } else { 0 };
        Ok(())
    }

    /// Reserves space up to `end`. A full file system is an error now and never a SIGBUS at a later write.
    fn reserve(&mut self, path: &Path, end: usize) -> Result<()> {
        if end <= self.taken {
            return Ok(());
        }
        let (start, length) = (self.taken as libc::off_t, (end - self.taken) as libc::off_t);
        // SAFETY: the descriptor is open for writing; the call touches no memory of this process.
        match unsafe { libc::posix_fallocate(self.file.as_raw_fd(), start, length) } {
            0 => {
                self.taken = end;
                Ok(())
            }
            code => Err(self.refused(path, code)),
        }
    }

    /// Checks that the required space is free.
    fn check(&self, path: &Path) -> Result<()> {
        if (self.bytes - self.taken) as u64 > free_bytes(&self.file) {
            return Err(self.refused(path, libc::ENOSPC));
        }
        Ok(())
    }

    fn refused(&self, path: &Path, code: i32) -> Error {
        let (bytes, free) = (self.bytes, free_bytes(&self.file));
        let needs =
            format!("reserving the arena {}: it needs {bytes} bytes, but {free} are free", path.display());
        Error::Io {
            context: format!("{needs}; use a smaller arena or a larger folder"),
            path: Some(path.to_owned()),
            source: io::Error::from_raw_os_error(code),
        }
    }
}

fn free_bytes(file: &File) -> u64 {
    let mut stats = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `stats` is writable and large enough; it is read only if the call reports that it filled it.
    unsafe {
        match libc::fstatvfs(file.as_raw_fd(), stats.as_mut_ptr()) {
            0 => stats.assume_init().f_bavail.saturating_mul(stats.assume_init().f_frsize),
            _ => u64::MAX,
        }
    }
}

/// Temporary name of a file in creation; removed at the end in any case.
struct Temporary(PathBuf);

impl Temporary {
    /// Also removes the file of a process that was killed while it created the same arena.
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
        // A failure cannot be handled in `drop`; the next `create` of this arena removes the file.
        let _ = fs::remove_file(&self.0);
    }
}
