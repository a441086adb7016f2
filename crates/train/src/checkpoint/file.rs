//! Replaces a file as a whole: readers see the old one or the new one, whenever the writer dies.
//!
//! The new file grows in the same folder under a random name, and its writer holds an advisory lock on it. Invariant: a
//! temporary file whose lock can be taken has no writer any more; so `sweep` removes it. A system without such locks
//! keeps what dead writers have left.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};
use tempfile::{Builder, NamedTempFile};

/// Temporary names are short: a file's own name may be as long as the system allows.
const BEGIN: &str = ".gpu-pool-";
const END: &str = ".part";
const RANDOM: usize = 16;
/// As many as Linux follows.
const MOST_LINKS: usize = 40;

/// Writes a new file in the place of `path`, or of what `path` links to. It gets the mode of the old file.
pub(super) fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> io::Result<()> {
    let path = &target(path)?;
    let old = match fs::metadata(path) {
        Ok(old) if old.is_file() => Some(old.permissions()),
        Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidInput, "no regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let folder = folder(path);
    // First, since what they hold may be what the disk lacks.
    system::sweep(folder);
    let part = begin(folder, old.is_some())?;
    let mut to = BufWriter::with_capacity(1 << 20, part.as_file());
    write(&mut to)?;
    to.flush()?;
    drop(to);
    if let Some(old) = old {
        part.as_file().set_permissions(old)?;
    }
    part.as_file().sync_all()?;
    part.persist(path).map_err(|error| error.error)?;
    system::sync(folder)
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn target(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(to) = fs::read_link(&path) else { return Ok(path) };
        system::may_follow(&path, folder(&path))?;
        path = folder(&path).join(to);
    }
    Err(io::Error::other("too many links"))
}

/// A new file with a lock. If it replaces a file, only the owner may read it until it has that file's mode.
fn begin(folder: &Path, private: bool) -> io::Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(BEGIN).suffix(END).rand_bytes(RANDOM);
    if let Some(mode) = system::mode(private) {
        builder.permissions(mode);
    }
    loop {
        let part = builder.tempfile_in(folder)?;
        if system::claim(part.as_file())? {
            return Ok(part);
        }
    }
}

fn is_temporary(name: &str) -> bool {
    name.len() == BEGIN.len() + RANDOM + END.len() && name.starts_with(BEGIN) && name.ends_with(END)
}

#[cfg(unix)]
mod system {
    use rustix::{
        fs::{FlockOperation, OFlags, flock},
        io::Errno,
        process::geteuid,
    };
    use std::{
        fs::{self, File, OpenOptions, Permissions},
        io,
        os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
        path::Path,
    };

    pub fn mode(private: bool) -> Option<Permissions> {
        Some(Permissions::from_mode(if private { 0o600 } else { 0o666 }))
    }

    /// Locks a new file. False if a [`sweep`] came before the lock.
    pub fn claim(file: &File) -> io::Result<bool> {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file.metadata()?.nlink() > 0),
            Err(Errno::WOULDBLOCK) => Ok(false),
            // A file system without locks: nothing is swept there.
            Err(_) => Ok(true),
        }
    }

    /// Removes temporary files whose writers are gone. A file that cannot be removed stays.
    pub fn sweep(folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            if !entry.file_name().to_str().is_some_and(super::is_temporary) {
                continue;
            }
            // NFS locks only what is open for writing. Another user may have planted a link or a pipe.
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
            let open = |write| OpenOptions::new().read(true).write(write).custom_flags(flags).open(entry.path());
            let Ok(file) = open(true).or_else(|_| open(false)) else { continue };
            let is_file = file.metadata().is_ok_and(|it| it.is_file());
            if is_file && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Linux's rule for links in folders where everybody may write (`protected_symlinks`), in all folders.
    pub fn may_follow(link: &Path, folder: &Path) -> io::Result<()> {
        let owner = fs::symlink_metadata(link)?.uid();
        if owner == geteuid().as_raw() || owner == fs::metadata(folder)?.uid() {
            return Ok(());
        }
        let why = format!("the link {} belongs to another user", link.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    pub fn sync(folder: &Path) -> io::Result<()> {
        let Ok(folder) = File::open(folder) else { return Ok(()) };
        match folder.sync_all() {
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
            result => result,
        }
    }
}

#[cfg(not(unix))]
mod system {
    use std::{
        fs::{File, Permissions},
        io,
        path::Path,
    };

    pub fn mode(_private: bool) -> Option<Permissions> {
        None
    }

    pub fn claim(_file: &File) -> io::Result<bool> {
        Ok(true)
    }

    pub fn sweep(_folder: &Path) {
        let _ = super::is_temporary;
    }

    pub fn may_follow(_link: &Path, _folder: &Path) -> io::Result<()> {
        Ok(())
    }

    pub fn sync(_folder: &Path) -> io::Result<()> {
        Ok(())
    }
}
