//! The digits: images of 8 x 8 pixels from 0 to 16 and a label from 0 to 9, one image per line of a CSV file (gzipped
//! or not).
//!
//! Every error names the file, the line and the expected content.

use crate::rng::Rng;
use anyhow::{Context, Result, bail, ensure};
use flate2::read::MultiGzDecoder;
use std::{
    fs::File,
    io::{Cursor, Read},
    path::Path,
};

/// Pixels of an image.
pub const PIXELS: usize = 64;
/// Labels from 0 to 9.
pub const CLASSES: usize = 10;

const BRIGHTEST: u8 = 16;
/// One image in five is held out: of the 1797 included images 360, so that 1437 are left for training.
const HELD_OUT: usize = 5;
const SPLIT_SEED: u64 = 7;
/// Limit for all bytes. This example is not for larger data, and a few bytes of gzip may unpack to any size.
const MOST_BYTES: u64 = 64 << 20;
/// Limit for the number of images, which take more memory than their text.
const MOST_IMAGES: usize = 100_000;
/// Limit for the text of one image, before it is parsed.
const MOST_BYTES_OF_A_LINE: u64 = 64 << 10;

static SHIPPED: &[u8] = include_bytes!("../data/digits.csv.gz");

/// Images and their labels, row after row, as the devices take them.
#[derive(Clone, Debug, Default)]
pub struct Images {
    /// `len() x PIXELS`, from 0 to 1.
    pub pixels: Vec<f32>,
    /// `len()` labels.
    pub labels: Vec<i32>,
}

/// The training images, and the images held out for judging.
#[derive(Debug)]
pub struct Digits {
    pub train: Images,
    pub held_out: Images,
}

impl Images {
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// These rows, in this order.
    pub fn pick(&self, rows: &[usize]) -> Images {
        let pixels = rows.iter().flat_map(|&r| &self.pixels[r * PIXELS..][..PIXELS]).copied().collect();
        Images { pixels, labels: rows.iter().map(|&r| self.labels[r]).collect() }
    }
}

impl Digits {
    /// Loads the file, or the data included in the example; always shuffled and split in the same way.
    pub fn load(path: Option<&Path>) -> Result<Digits> {
        let all = match path {
            None => read(SHIPPED).context("the digits that come with the example")?,
            Some(path) => {
                let name = path.display();
                let mut bytes = Vec::new();
                File::open(path)
                    .and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes))
                    .with_context(|| format!("cannot read the data file {name}"))?;
                ensure!((bytes.len() as u64) < MOST_BYTES, "the data file {name} is larger than {MOST_BYTES} bytes");
                read(&bytes).with_context(|| format!("the data file {name} is not usable"))?
            }
        };
        let mut order: Vec<usize> = (0..all.len()).collect();
        Rng::new(SPLIT_SEED).shuffle(&mut order);
        let (train, held_out) = order.split_at(all.len() * (HELD_OUT - 1) / HELD_OUT);
        Ok(Digits { train: all.pick(train), held_out: all.pick(held_out) })
    }
}

/// Parses the bytes of a file, gzipped or not.
pub fn read(bytes: &[u8]) -> Result<Images> {
    ensure!(!bytes.is_empty(), "it is empty");
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let mut text = MultiGzDecoder::new(Cursor::new(bytes)).take(MOST_BYTES);
        let images = parse(&mut text);
        ensure!(text.limit() > 0, "it unpacks to more than {MOST_BYTES} bytes");
        images
    } else {
        parse(bytes)
    }
}

fn parse(source: impl Read) -> Result<Images> {
    let mut images = Images::default();
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(source.take(0));
    let mut record = csv::ByteRecord::new();
    let mut line = 0;
    loop {
        reader.get_mut().set_limit(MOST_BYTES_OF_A_LINE);
        let found = reader.read_byte_record(&mut record);
        ensure!(reader.get_ref().limit() > 0, "after line {line}: no image ends within {MOST_BYTES_OF_A_LINE} bytes");
        match found {
            Ok(true) => ensure!(images.len() < MOST_IMAGES, "there are more than {MOST_IMAGES} images in it"),
            Ok(false) => break,
            Err(error) => return Err(unreadable(error, line)),
        }
        line = record.position().map_or(line + 1, csv::Position::line);
        if record.len() != PIXELS + 1 {
            bail!("line {line}: expected {PIXELS} pixels and a label, {} columns, found {}", PIXELS + 1, record.len());
        }
        for (column, field) in (1..).zip(record.iter().take(PIXELS)) {
            let pixel = whole(field).filter(|&v| v <= BRIGHTEST);
            let pixel = pixel.with_context(|| expected(line, column, "a pixel", BRIGHTEST, field))?;
            images.pixels.push(f32::from(pixel) / f32::from(BRIGHTEST));
        }
        let label = whole(&record[PIXELS]).filter(|&v| usize::from(v) < CLASSES);
        let label = label.with_context(|| expected(line, PIXELS + 1, "a label", CLASSES as u8 - 1, &record[PIXELS]))?;
        images.labels.push(label.into());
    }
    ensure!(images.len() > 0, "there are no images in it");
    ensure!(images.len() >= HELD_OUT, "{} images are too few, at least {HELD_OUT} are needed", images.len());
    Ok(images)
}

fn whole(field: &[u8]) -> Option<u8> {
    std::str::from_utf8(field).ok()?.trim().parse().ok()
}

fn expected(line: u64, column: usize, what: &str, most: u8, found: &[u8]) -> String {
    let shown: String = String::from_utf8_lossy(found).chars().take(20).collect();
    format!("line {line}, column {column}: expected {what}, a whole number from 0 to {most}, found {shown:?}")
}

/// Gzip's own message ("corrupt deflate stream") does not say what happened to the file.
fn unreadable(error: csv::Error, line: u64) -> anyhow::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
            anyhow::anyhow!("the gzip data ends too early, after line {line}: the file is truncated")
        }
        csv::ErrorKind::Io(e) => anyhow::anyhow!("the gzip data is damaged after line {line}: {e}"),
        other => anyhow::anyhow!("after line {line}: {other:?}"),
    }
}
