//! An arena: begin, write, commit; versions, digests, verification.

use super::digests::digest;
use super::layout::{HEADER, Layout, STATES, Unit};
use super::mapping::{self, Space};
use super::state::{State, oldest};
use crate::ensure;
use crate::error::{Error, Result};
use memmap2::MmapRaw;
use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes that are reserved in one turn before other threads may continue: tens of milliseconds.
const RESERVED_AT_ONCE: usize = 64 << 20;

/// A guard that keeps memory page-locked until it is dropped.
pub type PageLock = Box<dyn Any + Send>;

/// Two versions of a set of units in shared memory.
///
/// One process writes at a time. The caller must not write a buffer while it is committed or verified.
pub struct Arena {
    path: PathBuf,
    /// Dropped before the mapping.
    page_lock: Mutex<Option<PageLock>>,
    mapping: MmapRaw,
    layout: Layout,
    /// Space that is not ready to be written yet.
    missing: Mutex<Option<Space>>,
}

impl Arena {
    /// Creates an arena at `path` with all its space reserved; missing folders are created, accessible only to the
    /// owner.
    ///
    /// # Errors
    /// [`Error::Io`] if the path exists or the space is not available; nothing is left behind. [`Error::Invalid`] for
    /// units that cannot be laid out.
    pub fn create(path: &Path, meta: &str, units: &[(String, usize)]) -> Result<Self> {
        let layout = Layout::new(meta, units)?;
        Ok(Self::new(path, mapping::create(path, &layout, false, None)?, layout))
    }

    /// Creates an arena like [`create`](Self::create), but only checks that its space is free.
    /// [`reserve`](Self::reserve), which takes time for each byte, must follow before anything is written to a buffer.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_unreserved(path: &Path, meta: &str, units: &[(String, usize)]) -> Result<Self> {
        let layout = Layout::new(meta, units)?;
        Ok(Self::new(path, mapping::create(path, &layout, true, None)?, layout))
    }

    /// Creates an arena from the file at `room`, on the same file system, together with its space. Its bytes must be
    /// all zero. Excess space is released. Missing space is reserved, or with `later` left to
    /// [`reserve`](Self::reserve), as are all page faults.
    ///
    /// # Errors
    /// As [`create`](Self::create); also [`Error::Io`] if there is no such file.
    pub fn create_in(
        path: &Path,
        meta: &str,
        units: &[(String, usize)],
        room: &Path,
        later: bool,
    ) -> Result<Self> {
        let layout = Layout::new(meta, units)?;
        Ok(Self::new(path, mapping::create(path, &layout, later, Some(room))?, layout))
    }

    fn new(path: &Path, (mapping, missing): (MmapRaw, Option<Space>), layout: Layout) -> Self {
        let path = path.to_owned();
        Self { path, page_lock: Mutex::new(None), mapping, layout, missing: Mutex::new(missing) }
    }

    /// Reserves at most `most_bytes` more of its space. Returns whether all space is reserved and the buffer that is
    /// written now or next is ready. Several threads may call it. The page faults of the other buffer are taken before
    /// it is used.
    ///
    /// # Errors
    /// [`Error::Io`] if the space is no longer available; it may be tried again.
    pub fn reserve(&self, most_bytes: usize) -> Result<bool> {
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(space) = missing.as_mut() else { return Ok(true) };
        let next = oldest([self.complete(0), self.complete(1)]);
        let end = if next == 0 { self.layout.buffer_at(1) } else { self.layout.file_bytes() };
        let is_reserved = space.take(most_bytes, end, &self.path, &self.mapping)?;
        if space.is_ready() {
            *missing = None;
        }
        Ok(is_reserved)
    }

    /// Reserves all remaining space; several threads share the work.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub(super) fn reserve_all(&self) -> Result<()> {
        while !self.reserve(RESERVED_AT_ONCE)? {}
        Ok(())
    }

    /// Opens an arena that an earlier process has left.
    ///
    /// # Errors
    /// [`Error::Io`] if it is missing, [`Error::Corrupt`] if it is not a complete arena.
    pub fn open(path: &Path) -> Result<Self> {
        let (mapping, layout) = mapping::open(path)?;
        Ok(Self::new(path, (mapping, None), layout))
    }

    /// Path of the file, which may be unlinked.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Page-locks the mapping for its lifetime by calling `lock` once with its start and size.
    ///
    /// # Errors
    /// Those of `lock`; the mapping is then unchanged.
    pub fn page_lock(&self, lock: impl FnOnce(*mut u8, usize) -> Result<PageLock>) -> Result<()> {
        let mut locked = self.page_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if locked.is_none() {
            *locked = Some(lock(self.mapping.as_mut_ptr(), self.mapping.len())?);
        }
        Ok(())
    }

    /// Whether the mapping is page-locked.
    pub fn is_page_locked(&self) -> bool {
        self.page_lock.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The layout of a buffer.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Starts to overwrite the buffer without a version, or else the older one, and returns its index. The buffer has
    /// no version until it is committed.
    pub fn begin(&self, version: u64) -> usize {
        let index = oldest([self.complete(0), self.complete(1)]);
        self.state(index).begin(version);
        index
    }

    /// Returns the start of a buffer of [`Layout::payload_bytes`], valid as long as the arena: version and digests
    /// first, then units.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the index is not 0 or 1.
    pub fn buffer(&self, index: usize) -> Result<*mut u8> {
        ensure!(index < 2, "index: expected 0 or 1, got {index}");
        // SAFETY: both buffers lie within the mapping, which is as long as the layout says.
        Ok(unsafe { self.mapping.as_mut_ptr().add(self.layout.buffer_at(index)) })
    }

    /// Publishes a buffer that was written by this process: computes its digests and returns them.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the buffer was begun.
    pub fn commit(&self, index: usize) -> Result<Vec<u64>> {
        self.check_begun(index)?;
        let digests: Vec<u64> =
            self.layout.units().iter().map(|unit| digest(self.unit(index, unit))).collect();
        self.commit_with(index, &digests)?;
        Ok(digests)
    }

    /// Publishes a buffer that was written by this process, with digests that were computed meanwhile, one per unit.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the buffer was begun and there is one digest per unit.
    pub fn commit_with(&self, index: usize, digests: &[u64]) -> Result<()> {
        let version = self.check_begun(index)?;
        let num_units = self.layout.units().len();
        ensure!(digests.len() == num_units, "digests: expected {num_units}, got {}", digests.len());
        let table = self.buffer(index)?.cast::<u64>();
        for (position, word) in std::iter::once(&version).chain(digests).enumerate() {
            // SAFETY: the table is at the start of the buffer, aligned to 64 bytes, and has 8 bytes for the version and
            // each unit.
            unsafe { table.add(position).write(word.to_le()) };
        }
        self.state(index).publish();
        Ok(())
    }

    /// Publishes a buffer that was received from a peer, including version and digests, if its version is the one that
    /// was begun and every unit matches its digest.
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the units that do not match, or the other version; the buffer stays without a version.
    /// [`Error::Invalid`] unless the buffer was begun.
    pub fn commit_received(&self, index: usize) -> Result<()> {
        let (version, received) = (self.check_begun(index)?, self.named(index));
        if received != version {
            let problem = format!(
                "expected version {version}, received {received}; fetch it again from another holder"
            );
            return Err(Error::corrupt(problem).of_object(self.path.display().to_string()));
        }
        let wrong = self.mismatches(index);
        if !wrong.is_empty() {
            let problem = format!(
                "{} of {} received units do not match their digests: {}; fetch them again from another holder",
                wrong.len(),
                self.layout.units().len(),
                wrong.join(", ")
            );
            return Err(Error::Corrupt {
                object: Some(self.path.display().to_string()),
                units: wrong,
                problem,
            });
        }
        self.state(index).publish();
        Ok(())
    }

    /// Returns index and version of the complete buffers, newest first.
    pub fn versions(&self) -> Vec<(usize, u64)> {
        let complete = |index| self.complete(index).map(|version| (index, version));
        let mut versions: Vec<(usize, u64)> = (0..2).filter_map(complete).collect();
        versions.sort_by_key(|&(index, version)| (std::cmp::Reverse(version), index));
        versions
    }

    /// Returns the digests that were computed when a complete buffer was written.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the buffer is complete.
    pub fn digests(&self, index: usize) -> Result<Vec<u64>> {
        self.check_complete(index)?;
        Ok((0..self.layout.units().len()).map(|position| self.recorded(index, position)).collect())
    }

    /// Returns the names of the units of a complete buffer whose bytes do not match their digests.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the buffer is complete.
    pub fn verify(&self, index: usize) -> Result<Vec<String>> {
        self.check_complete(index)?;
        Ok(self.mismatches(index))
    }

    /// Removes the file; the mapping stays until the arena is dropped. A missing file is no error.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn unlink(&self) -> Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("removing the arena", &self.path, error))
            }
            _ => Ok(()),
        }
    }

    fn state(&self, index: usize) -> &State {
        debug_assert!(index < 2 && STATES + 2 * size_of::<State>() <= HEADER);
        // SAFETY: the header holds two states, one cache line each, at this offset of a page-aligned mapping. They are
        // atomics, for which every bit pattern is valid, and are only changed through atomics.
        unsafe { &*self.mapping.as_ptr().add(STATES).cast::<State>().add(index) }
    }

    fn unit(&self, index: usize, unit: &Unit) -> &[u8] {
        let at = self.layout.buffer_at(index) + unit.offset;
        // SAFETY: the unit lies within the mapping; the caller does not write it meanwhile (see `Arena`).
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(at), unit.bytes) }
    }

    /// The version of a buffer that is complete and records the same version itself.
    fn complete(&self, index: usize) -> Option<u64> {
        self.state(index).complete().filter(|&version| self.named(index) == version)
    }

    /// The version that the buffer itself records.
    fn named(&self, index: usize) -> u64 {
        self.word(index, 0)
    }

    /// The recorded digest of a unit.
    fn recorded(&self, index: usize, position: usize) -> u64 {
        self.word(index, 1 + position)
    }

    fn word(&self, index: usize, position: usize) -> u64 {
        let at = self.layout.buffer_at(index) + 8 * position;
        // SAFETY: the table is at the start of the buffer, aligned to 64 bytes, and has 8 bytes for the version and
        // each unit.
        u64::from_le(unsafe { self.mapping.as_ptr().add(at).cast::<u64>().read() })
    }

    fn mismatches(&self, index: usize) -> Vec<String> {
        let differs = |&(position, unit): &(usize, &Unit)| {
            digest(self.unit(index, unit)) != self.recorded(index, position)
        };
        self.layout.units().iter().enumerate().filter(differs).map(|(_, unit)| unit.name.clone()).collect()
    }

    /// Returns the version that was begun.
    fn check_begun(&self, index: usize) -> Result<u64> {
        ensure!(index < 2, "index: expected 0 or 1, got {index}");
        self.state(index).writing().ok_or_else(|| {
            Error::invalid(format!("index: buffer {index} is not being written; call begin first"))
        })
    }

    fn check_complete(&self, index: usize) -> Result<()> {
        ensure!(index < 2, "index: expected 0 or 1, got {index}");
        ensure!(
            self.complete(index).is_some(),
            "index: buffer {index} has no complete version; see versions"
        );
        Ok(())
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Arena").field("path", &self.path).finish_non_exhaustive()
    }
}
