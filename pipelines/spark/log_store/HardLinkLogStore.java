package io.mongomedallion.storage;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.DirectoryIteratorException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.Iterator;
import java.util.TreeSet;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log on a local or shared POSIX file system with a compare-and-set: a commit is written aside and gets its
 * name by link(2), which fails where the name is taken. rename(2), which Delta's own store uses, replaces a rival's commit.
 */
public final class HardLinkLogStore extends HadoopFileSystemLogStore {
    public HardLinkLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf) throws IOException {
        java.nio.file.Path target = local(path);
        java.nio.file.Path aside = target.resolveSibling("." + target.getFileName() + "." + UUID.randomUUID() + ".tmp");
        if (!Files.isDirectory(target.getParent())) {
            throw new FileNotFoundException("No such file or directory: " + target.getParent());
        }
        try {
            try (FileChannel out = FileChannel.open(aside, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
                java.nio.ByteBuffer content = java.nio.ByteBuffer.wrap(ConditionalPutLogStore.lines(actions));
                while (content.hasRemaining()) {
                    out.write(content);
                }
                // Or a power failure leaves a name without its content, and a later commit with it.
                out.force(true);
            }
            if (overwrite) {
                // Left by a writer with Delta's own store; it would not match what comes now.
                Files.deleteIfExists(target.resolveSibling("." + target.getFileName() + ".crc"));
                Files.move(aside, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
            } else {
                Files.createLink(target, aside);
            }
        } catch (java.nio.file.FileAlreadyExistsException taken) {
            throw new java.nio.file.FileAlreadyExistsException(path.toString());
        } finally {
            Files.deleteIfExists(aside);
        }
    }

    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return true;
    }

    /**
     * Hadoop's own listing asks the disk about every file and holds what it says: of the log of a table with a commit a second,
     * millions of entries, that is more than a JVM's memory. Delta wants the last few of them, or the first few.
     */
    @Override
    public Iterator<FileStatus> listFrom(Path path, Configuration hadoopConf) throws IOException {
        return new Listing(path.getFileSystem(hadoopConf), path);
    }

    private static java.nio.file.Path local(Path path) {
        return java.nio.file.Path.of(Path.getPathWithoutSchemeAndAuthority(path).toString());
    }

    /** The files of a folder in the order of their names, of which at most HELD are held; for more the folder is read again. */
    private static final class Listing extends ConditionalPutLogStore.FileListing {
        private static final int HELD = 50_000;

        private final FileSystem fileSystem;
        private final Path folder;
        private final TreeSet<String> names = new TreeSet<>();
        private boolean isWhole;

        Listing(FileSystem fileSystem, Path from) throws IOException {
            this.fileSystem = fileSystem;
            this.folder = from.getParent();
            read(from.getName());
            advance();
        }

        private void read(String from) throws IOException {
            isWhole = true;
            try (DirectoryStream<java.nio.file.Path> entries = Files.newDirectoryStream(local(folder))) {
                for (java.nio.file.Path entry : entries) {
                    String name = entry.getFileName().toString();
                    if (name.compareTo(from) < 0) {
                        continue;
                    }
                    if (names.size() == HELD && name.compareTo(names.last()) > 0) {
                        isWhole = false;
                        continue;
                    }
                    names.add(name);
                    if (names.size() > HELD) {
                        names.pollLast();
                        isWhole = false;
                    }
                }
            } catch (NoSuchFileException error) {
                throw new FileNotFoundException("No such file or directory: " + folder);
            } catch (DirectoryIteratorException error) {
                throw error.getCause();
            }
        }

        @Override
        FileStatus following() throws IOException {
            while (!names.isEmpty()) {
                String name = names.pollFirst();
                if (names.isEmpty() && !isWhole) {
                    read(name + '\0');
                }
                try {
                    return fileSystem.getFileStatus(new Path(folder, name));
                } catch (FileNotFoundException error) { // removed meanwhile
                }
            }
            return null;
        }
    }
}
